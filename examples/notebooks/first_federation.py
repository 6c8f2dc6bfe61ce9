# %% [markdown]
# # A first federation
#
# Twenty clients with unequal parts of scikit-learn's digits, five of them a round. Nothing is downloaded, and a CPU is
# enough.

# %%
# %pip install lit-fed

# %%
import csv
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from lightning import seed_everything

from lit_fed import Classifier, FederatedTrainer
from lit_fed.data import Digits, Dirichlet
from lit_fed.methods import FedAvg, FedProx
from lit_fed.participation import UniformParticipation

data = Digits(num_clients=20, partition=Dirichlet(alpha=0.3), batch_size=20)
data.setup()
print("training samples a client:", [data.census.num_samples(client) for client in range(20)])

# %% [markdown]
# Each client has digits of some classes only: the darker, the more samples.

# %%
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.imshow(np.stack([data.census.class_counts(client) for client in range(20)]).T, cmap="Blues", aspect="auto")
_ = axes.set(xlabel="client", ylabel="digit", xticks=range(0, 20, 2), yticks=range(10))


# %% [markdown]
# A method is the third argument of `fit`, beside the model and the data. The first weights follow from
# `seed_everything`, everything later from the trainer's seed, so both methods see the same cohorts.


# %%
def run(method, rounds=10):
    seed_everything(0, verbose=False)
    model = Classifier("small_cnn", num_classes=10, input_shape=data.input_shape)
    trainer = FederatedTrainer(
        max_rounds=rounds,
        local_epochs=5,
        seed=0,
        participation=UniformParticipation(count=5),
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
    )
    trainer.fit(model, data, method)
    return trainer


averaged = run(FedAvg())
near = run(FedProx(mu=0.1))

# %% [markdown]
# `global/acc` is the global model on the shared test set, `clients/acc_mean` each client on test samples of its own
# classes. What else a round gives is in `metrics.csv` of the run's folder.

# %%
for name in ("global/acc", "clients/acc_mean", "clients/acc_min", "drift/update_norm_mean"):
    print(f"{name:<24} FedAvg {averaged.metrics[name]:.3f}  FedProx {near.metrics[name]:.3f}")

# %% [markdown]
# Each round is a row of `metrics.csv`.

# %%
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name, trainer in {"FedAvg": averaged, "FedProx": near}.items():
    with open(trainer.log_dir / "metrics.csv", newline="", encoding="utf-8") as file:
        axes.plot([float(row["global/acc"]) for row in csv.DictReader(file)], label=name)
axes.set(xlabel="round", ylabel="accuracy of the global model", ylim=(0, 1))
_ = axes.legend(loc="lower right")

# %% [markdown]
# Another method is another third argument, another population another second one, and `Classifier` may be any
# `LightningModule`: see the notebook on a module and data of your own.
#
# The run with FedProx is a file, too: `lit-fed fit -c first_federation.yaml` trains the same network to the bit, in a
# terminal or on a cluster.

# %%
_ = Path("first_federation.yaml").write_text("""\
trainer:
  max_rounds: 10
  local_epochs: 5
  seed: 0
  participation:
    class_path: UniformParticipation
    init_args:
      count: 5
  accelerator: cpu
  devices: 1
  enable_progress_bar: false
data:
  class_path: Digits
  init_args:
    num_clients: 20
    partition:
      class_path: Dirichlet
      init_args:
        alpha: 0.3
    batch_size: 20
model:
  class_path: Classifier
  init_args:
    network: small_cnn
algorithm:
  class_path: FedProx
  init_args:
    mu: 0.1
""")
