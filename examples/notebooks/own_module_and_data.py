# %% [markdown]
# # A module and data of your own
#
# A regression of two targets from ten numbers, as a plain `LightningModule`, on arrays that belong to eight clients.
# The data are made up here: each client measures with an offset of its own.

# %%
# %pip install lit-fed

# %%
import numpy as np
import torch
from lightning import LightningModule, seed_everything
from torch import nn
from torch.nn.functional import mse_loss

from lit_fed import FederatedTrainer
from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.methods import FedAvg, LocalOnly


class Regression(LightningModule):
    metrics = {"mae": "min"}  # which round is the best, and which way is better

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return mse_loss(self.layers(x), y)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("mae", (self.layers(x) - y).abs().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


# %% [markdown]
# Samples that have owners say whose they are, and the partition is `Natural`.


# %%
class Sensors(TensorDataModule):
    input_shape = (10,)
    output_shape = (2,)

    def load_arrays(self) -> Arrays:
        rng = np.random.default_rng(0)
        owner = np.repeat(np.arange(8), 60)
        x = rng.normal(size=(480, 10)).astype(np.float32)
        y = (np.stack([x[:, 0] + x[:, 1], x[:, 2]], axis=1) + 0.1 * owner[:, None]).astype(np.float32)
        train = np.arange(480) % 60 < 40
        return Arrays(*(x[train], y[train], x[~train], y[~train]), client_train=owner[train], client_test=owner[~train])


data = Sensors(num_clients=8, partition=Natural(), batch_size=20)

# %% [markdown]
# Together, and each client alone:

# %%
for method in (FedAvg(), LocalOnly()):
    seed_everything(0, verbose=False)
    trainer = FederatedTrainer(max_rounds=10, local_epochs=2, accelerator="cpu", devices=1, enable_progress_bar=False)
    trainer.fit(Regression(), data, method)
    error = trainer.metrics["clients/mae_mean"]
    print(f"{type(method).__name__:<10} mean absolute error on a client's own data: {error:.3f}")
