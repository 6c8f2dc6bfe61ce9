"""Everything needed to write a method, or a wrapper around methods; the engine's rooms stay private."""

from __future__ import annotations

from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.server_training import ServerLoop
from lit_fed.engine.lightning.alone import objective_of
from lit_fed.engine.lightning.objective import Objective, head_names, head_of, task_name
from lit_fed.engine.method.algorithm import (
    NEEDS,
    Algorithm,
    Cohort,
    Regularizer,
    Server,
    Terms,
    global_model,
    sole,
    zeros_like,
)
from lit_fed.engine.method.client import (
    Client,
    EffectiveSteps,
    FineTuning,
    LocalWork,
    Pass,
    Phase,
    Stage,
    Tensors,
    Update,
)
from lit_fed.engine.method.kinds import Kinds
from lit_fed.engine.method.model import Model, Split
from lit_fed.engine.method.population import Population
from lit_fed.engine.method.reducers import ByPrefix, Gather, Reducer, WeightedMean
from lit_fed.engine.method.task_run import Outputs
from lit_fed.engine.method.wrapper import Aggregation, Attack, Privacy, WrapperState
from lit_fed.engine.wire.batches import batch_size_of, halve_batch
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate, Layout, Payload, add_prefix, num_bytes, split_prefix
from lit_fed.engine.wire.updates import Updates
from lit_fed.engine.wire.workers import Workers
from lit_fed.face import live_here
from lit_fed.patterns import chosen_names
from lit_fed.tensors import map_tensors

__all__ = [
    "NEEDS",
    "Aggregation",
    "Algorithm",
    "Attack",
    "Broadcast",
    "ByPrefix",
    "Client",
    "ClientUpdate",
    "Cohort",
    "EffectiveSteps",
    "FineTuning",
    "Gather",
    "Kinds",
    "Layout",
    "LocalLoop",
    "LocalWork",
    "Model",
    "Objective",
    "Outputs",
    "Pass",
    "Payload",
    "Phase",
    "Population",
    "Privacy",
    "Reducer",
    "Regularizer",
    "Server",
    "ServerLoop",
    "Split",
    "Stage",
    "Tensors",
    "Terms",
    "Update",
    "Updates",
    "WeightedMean",
    "Workers",
    "WrapperState",
    "add_prefix",
    "batch_size_of",
    "chosen_names",
    "global_model",
    "halve_batch",
    "head_names",
    "head_of",
    "map_tensors",
    "num_bytes",
    "objective_of",
    "sole",
    "split_prefix",
    "task_name",
    "zeros_like",
]

live_here(globals())
