"""Everything that takes part in a run, put together once before the first round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed
from lightning import Fabric

from lit_fed.algorithm import Algorithm
from lit_fed.client import BufferPolicy, ClientContext, ClientModule
from lit_fed.errors import ConfigError
from lit_fed.executor import SequentialExecutor
from lit_fed.local import GradientOptions, LocalLoop
from lit_fed.optimization import check_optimization
from lit_fed.participation import Participation
from lit_fed.payload import Channel, Payload
from lit_fed.store import ClientStore
from lit_fed.strategy import Workers

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule


@dataclass(slots=True)
class Federation:
    """The parts of a running federation; what protocols and callbacks look at.

    Args:
        fabric: Launched.
        workers: The processes over which clients are spread.
        module: The one client module of this process, on its device.
        algorithm: The server.
        data: The population.
        participation: Who takes part.
        channel: The wire.
        store: The clients' states.
        loop: Trains and evaluates the module.
        executor: Runs clients.
        seed: The seed of the run.
    """

    fabric: Fabric
    workers: Workers
    module: ClientModule
    algorithm: Algorithm[Any]
    data: FederatedDataModule
    participation: Participation
    channel: Channel
    store: ClientStore
    loop: LocalLoop
    executor: SequentialExecutor
    seed: int

    def evaluation_broadcast(self, round_idx: int) -> Payload:
        """What a client receives to be tested with, after the wire."""
        return self.channel.down(self.algorithm.evaluation_broadcast(round_idx))[0]


def assemble(
    fabric: Fabric,
    module: ClientModule,
    data: FederatedDataModule,
    algorithm: Algorithm[Any],
    *,
    participation: Participation,
    gradients: GradientOptions,
    channel: Channel,
    store: ClientStore,
    buffers: BufferPolicy,
    compile_network: bool,
    seed: int,
) -> Federation:
    """Check that the parts fit, set them up in order, and join them.

    Raises:
        ConfigError: For parts that cannot work together; nothing has been trained yet.
    """
    if not isinstance(module, ClientModule):
        raise ConfigError(f"model {type(module).__name__} is not a ClientModule; derive it from lit_fed.ClientModule")
    workers = Workers(fabric)
    with fabric.rank_zero_first():
        data.prepare_data()
    data.setup("fit")
    data.move_to(fabric.device)
    participation.setup(data.num_clients, data.num_samples, seed)
    if participation.nominal_cohort_size < workers.world_size:
        raise ConfigError(
            f"a cohort of {participation.nominal_cohort_size} clients cannot keep {workers.world_size} processes busy;"
            " use fewer devices, a larger cohort, or strategy=ddp"
        )
    module.buffer_policy = buffers
    module.work.ctx = ClientContext(0, 0, "train", seed, data)  # a module may ask who is working
    check_optimization(module, workers.data_parallel)
    loop = LocalLoop(fabric, module, workers, gradients)
    module.prepare_round(0)
    _same_start_everywhere(module, fabric)
    if compile_network:
        for child in module.children():
            if any(True for _ in child.parameters()):
                child.compile()
    algorithm.setup(module, data, fabric)
    executor = SequentialExecutor(loop, store, data, seed)
    return Federation(fabric, workers, module, algorithm, data, participation, channel, store, loop, executor, seed)


def _same_start_everywhere(module: ClientModule, fabric: Fabric) -> None:
    """Every process starts from the first one's weights, whatever it drew itself."""
    if fabric.world_size > 1:
        for name in module.state_names():
            torch.distributed.broadcast(module.tensor(name), src=0)
            module.initial_tensors[name].copy_(module.tensor(name))
