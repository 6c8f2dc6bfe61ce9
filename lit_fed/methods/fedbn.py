"""FedBN.

Li, Jiang, Zhang, Kamp, Dou: "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1. The server is FedAvg's.
"""

from __future__ import annotations

import lit_fed.algorithm as fed
from lit_fed.errors import ConfigError
from lit_fed.methods.fedavg import FedAvg
from lit_fed.private_names import BATCH_NORMS


class FedBN(FedAvg):
    """Batch norm stays with the client, its scale, shift and running statistics; everything else is averaged.

    Batch norm is every module of a subclass of PyTorch's, under any name. A client that never took part begins with the
    first model's batch norm, whose statistics it learns in its first round. There is no global model to test on the
    shared test set; `ClientTest` tests each client's model.

    It takes the settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: Before training, if the model has no batch norm.

    Note:
        The paper weighs clients equally and equalises their sizes; so does ``weighting: uniform``. Its code tells batch
        norm by the letters "bn" in a name, which averages a ResNet's ``downsample.1``. Other buffers follow
        ``trainer.buffers``.
    """

    def split(self, model: fed.Model, round_idx: int) -> fed.Split:
        """The parameters and buffers of batch norm stay, all others travel."""
        norms = [(name, one) for name, one in model.task.named_modules() if isinstance(one, BATCH_NORMS)]
        own = {f"{name}.{key}" for name, one in norms for key in one.state_dict()}
        if own <= set(model.fixed):
            raise ConfigError(
                f"algorithm FedBN needs batch norm in model {fed.task_name(model.task)}; choose a network with batch "
                "norm, such as resnet18, or FedAvg"
            )
        personal = tuple(name for name in model.parameters if name in own)
        buffers = tuple(name for name in model.buffers if name in own)
        return fed.Split(tuple(name for name in model.parameters if name not in own), personal, buffers=buffers)
