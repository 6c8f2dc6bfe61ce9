# %% [markdown]
# # Privacy and attack
#
# One key protects clients from those who see the models, one key makes some clients attack, one key puts a robust rule
# in place of the mean. The method stays FedAvg. The extra `privacy` is the accountant of ε.

# %%
# %pip install 'lit-fed[privacy]'

# %%
import matplotlib.pyplot as plt
from lightning import seed_everything

from lit_fed import Classifier, FederatedTrainer
from lit_fed.data import Digits, Dirichlet
from lit_fed.methods import FedAvg
from lit_fed.participation import PoissonParticipation
from lit_fed.privacy import ClientLevel
from lit_fed.robust import MultiKrum, SignFlip

data = Digits(num_clients=20, partition=Dirichlet(alpha=1.0), batch_size=20)


def run(rounds=15, **settings):
    seed_everything(0, verbose=False)
    trainer = FederatedTrainer(
        max_rounds=rounds,
        local_epochs=2,
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_pictures=False,
        **settings,
    )
    trainer.fit(Classifier("mlp", num_classes=10, input_shape=data.input_shape), data, FedAvg(weighting="uniform"))
    return trainer.metrics


accuracy = {"nobody attacks": run()["global/acc"]}

# %% [markdown]
# A fifth of the clients send the opposite of their update. The mean takes it in; Multi-Krum leaves out the updates that
# are far from the others.

# %%
attack = SignFlip(fraction=0.2)
accuracy["attack, mean"] = run(attack=attack)["global/acc"]
accuracy["attack, Multi-Krum"] = run(attack=attack, aggregation=MultiKrum(attackers=4))["global/acc"]
for name, value in accuracy.items():
    print(f"{name:<20} {value:.3f}")

# %% [markdown]
# Differential privacy at client level: updates are clipped, and the server adds noise so that all rounds together spend
# ε = 8. With twenty clients the noise is large: privacy needs a crowd, and the accuracy here is its price.

# %%
spent = run(
    participation=PoissonParticipation(fraction=0.5),
    privacy=ClientLevel(clip_norm=0.5, epsilon=8.0, delta=0.001),
    on_client_failure="skip",
)
accuracy["ε = 8"] = spent["global/acc"]
print(f"accuracy {spent['global/acc']:.3f}, ε spent {spent['privacy/epsilon']:.2f}")

# %%
figure, axes = plt.subplots(figsize=(6, 2.5), layout="constrained")
axes.barh(list(accuracy), list(accuracy.values()))
axes.invert_yaxis()
_ = axes.set(xlabel="accuracy of the global model", xlim=(0, 1))
