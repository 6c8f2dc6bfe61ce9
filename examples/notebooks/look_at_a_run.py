# %% [markdown]
# # Look at a run
#
# What a run leaves behind are plain files. Here a small run is made first; for one of your own set `folder` to it.

# %%
# %pip install lit-fed

# %%
import csv
from collections import defaultdict

import matplotlib.pyplot as plt
import torch
from lightning import seed_everything

from lit_fed import Classifier, FederatedTrainer, load_network
from lit_fed.data import Digits, Dirichlet
from lit_fed.methods import FedAvg

seed_everything(0, verbose=False)
data = Digits(num_clients=8, partition=Dirichlet(alpha=0.3), batch_size=20)
model = Classifier("small_cnn", num_classes=10, input_shape=data.input_shape)
trainer = FederatedTrainer(max_rounds=6, local_epochs=2, accelerator="cpu", devices=1, enable_progress_bar=False)
trainer.fit(model, data, FedAvg())
folder = trainer.log_dir
print(sorted(path.name for path in folder.iterdir() if not path.name.startswith((".", "events"))))

# %% [markdown]
# `metrics.csv` has a row a round.

# %%
with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
    rounds = list(csv.DictReader(file))
for row in rounds:
    print(row["round"], row["global/acc"], row["clients/acc_mean"], row["comm/total_bytes"])

# %% [markdown]
# `clients.csv` has a row a client and value; here each client's accuracy on its own test data, over the rounds.

# %%
curves = defaultdict(list)
with open(folder / "clients.csv", newline="", encoding="utf-8") as file:
    for row in csv.DictReader(file):
        if row["stage"] == "test" and row["metric"] == "acc":
            curves[int(row["client_id"])].append((int(row["round"]), float(row["value"])))

figure, axes = plt.subplots()
for client, curve in sorted(curves.items()):
    axes.plot(*zip(*curve, strict=True), label=f"client {client}")
axes.set(xlabel="round", ylabel="accuracy on the client's own test data", ylim=(0, 1))
axes.legend(ncols=2, fontsize="small")
figure.savefig(folder / "clients.png")

# %% [markdown]
# The trained network by itself takes inputs as they are stored, for its preprocessing comes with it. A run of the
# command line needs no second argument.

# %%
network = load_network(folder, Classifier("small_cnn", num_classes=10, input_shape=data.input_shape).network)
images = torch.randint(0, 17, (3, 1, 8, 8), dtype=torch.uint8)  # digits have 17 shades; these are noise
with torch.no_grad():
    predicted = network(images).argmax(dim=1)
print("taken for", predicted.tolist())
