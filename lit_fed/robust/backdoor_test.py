"""The success of a backdoor, as a protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.engine.evaluation.federation import Federation
from lit_fed.engine.evaluation.protocols import EvalSubset, Evaluation, Protocol
from lit_fed.errors import ConfigError
from lit_fed.protocols import global_loops
from lit_fed.robust.attack import Backdoor, pair


class BackdoorTest(Protocol):
    """Share of the shared test samples that the global model takes for the backdoor's class once they have its trigger.

    Samples of that class are left out: ``attack/backdoor_success``. Needs ``trainer.attack`` to be a
    `lit_fed.robust.Backdoor`, and a task that predicts classes.
    """

    name = "attack"

    @override
    def check(self, federation: Federation) -> None:
        if _backdoor(federation) is None:
            raise ConfigError("protocol BackdoorTest needs a trigger; set trainer.attack to Backdoor")

    @override
    def run(self, federation: Federation, round_idx: int, subset: EvalSubset) -> Evaluation:
        data, evaluation, attack = federation.data, Evaluation(), _backdoor(federation)
        assert attack is not None, "`check` refuses a run without"
        for name, loop in global_loops(self.name, federation, round_idx, evaluation):
            loader = data.test_loader() if subset == "test" else data.val_loader()
            fooled = total = 0
            for _, output in loop.predict(_triggered(loader, attack)):
                classes = _classes(output)
                fooled += int((classes == attack.target).sum())
                total += len(classes)
            if total:
                evaluation.metrics[f"{name}/backdoor_success"] = fooled / total
        return evaluation


def _triggered(batches: Iterable[Any], attack: Backdoor) -> Iterator[Tensor]:
    """Inputs of the other classes, with the trigger."""
    for batch in batches:
        x, y = pair(batch)
        if len(others := x[y != attack.target]):
            yield attack.triggered(others)


def _backdoor(federation: Federation) -> Backdoor | None:
    return next((wrapper for wrapper in federation.wrappers.stack if isinstance(wrapper, Backdoor)), None)


def _classes(output: Any) -> Tensor:
    """Classes (B,) of a ``predict_step``'s result: its ``prediction``, or logits (B, C)."""
    if isinstance(output, dict):
        output = output.get("prediction")
    if isinstance(output, Tensor) and output.ndim == 2:
        return output.argmax(1)
    if isinstance(output, Tensor) and output.ndim == 1 and output.dtype == torch.int64:
        return output
    raise ConfigError("protocol BackdoorTest needs a model whose predict_step gives logits or a prediction")
