"""Hide private names of torch, torchmetrics and Lightning from lit_fed, and run it: ``python -m tests.hide_names``.

The libraries themselves still see the names: a release that drops a name does without it. Prints a line of JSON for
each set of names, in a process of its own, with the models of a sequential run and of a run in groups.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import io
import json
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

# Imported once for all processes; lit_fed is imported after the names are hidden.
import lightning
import sklearn.datasets  # noqa: F401
import torch
import torchmetrics
import torchvision  # noqa: F401

PRIVATE: dict[str, set[str]] = {
    "torch": {
        "_foreach_add", "_foreach_addcmul_", "_foreach_copy_", "_foreach_div", "_foreach_lerp_",
        "_foreach_mul", "_foreach_mul_", "_foreach_norm", "_foreach_sign", "_foreach_sqrt", "_foreach_sub",
        "_foreach_zero_", "_softmax_backward_data", "_C",
    },
    "torch.nn.modules.batchnorm": {"_BatchNorm"},
    "torch._C": {"_autograd"},
    "torch._C._autograd": {"_profiler_enabled"},
    "torch.utils._pytree": {"tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"},
    "torch.utils._python_dispatch": {"TorchDispatchMode"},
    "torch.autograd.variable:VariableMeta": {"_execution_engine"},
    "torch.optim.optimizer": {"_global_optimizer_post_hooks", "_global_optimizer_pre_hooks"},
    "torch.optim:Optimizer": {"_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"},
    "torch.nn:Module": {"_non_persistent_buffers_set"},
    "torch:Tensor": {"_version"},
    "torchmetrics:Metric": {"_computed", "_reductions", "_update_count"},
    "torchmetrics:MetricCollection": {"_compute_groups_create_state_ref"},
}  # fmt: skip
"""By module, or by class, the names that lit_fed/private_names.py looks up."""

asked: set[str] = set()
"""Hidden names for which lit_fed asked."""


def hide(owner: Any, name: str) -> None:
    """Hide an attribute of a module, or of the objects of a class, from lit_fed."""

    def refuse() -> None:
        if str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0] == "lit_fed":
            asked.add(name)
            raise AttributeError(name)

    if isinstance(owner, ModuleType):

        class Hiding(type(owner)):  # type: ignore[misc]
            def __getattribute__(self, key: str) -> Any:
                if key == name:
                    refuse()
                return super().__getattribute__(key)

        owner.__class__ = Hiding
        return
    own = inspect.getattr_static(owner, name, None)

    class Hidden:
        def __get__(self, holder: Any, kind: Any) -> Any:
            refuse()
            if hasattr(type(own), "__get__"):
                return own.__get__(holder, kind)
            if holder is None or name not in vars(holder):
                raise AttributeError(name)
            return vars(holder)[name]

        def __set__(self, holder: Any, value: Any) -> None:
            vars(holder)[name] = value

        def __delete__(self, holder: Any) -> None:
            del vars(holder)[name]

    setattr(owner, name, Hidden())


def hide_all(names: Sequence[str]) -> None:
    for place, hidden in PRIVATE.items():
        module, _, kind = place.partition(":")
        owner = getattr(import_module(module), kind) if kind else attribute(module)
        for name in sorted(hidden & set(names)):
            hide(owner, name)


def attribute(path: str) -> Any:
    """A module, which may be in no file."""
    with suppress(ImportError):
        return import_module(path)
    parent, _, name = path.rpartition(".")
    return getattr(attribute(parent), name)


class Measured(lightning.LightningModule):
    """A task that uses metrics in every way that groups know."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(10)
        self.both = torchmetrics.MetricCollection(
            [torchmetrics.classification.MulticlassRecall(10), torchmetrics.classification.MulticlassPrecision(10)]
        )

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self.layer(x.flatten(1))
        self.accuracy.update(logits, y)
        self.log("acc", self.accuracy)
        self.log_dict(self.both(logits, y))
        return torch.nn.functional.cross_entropy(logits, y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def digest(task: Any) -> str:
    values = [tensor.detach().double().flatten() for tensor in task.state_dict().values()]
    return hashlib.sha256(torch.cat(values).numpy().tobytes()).hexdigest()


def results() -> dict[str, Any]:
    """What the command line says, and the models after two rounds, one client after the other and in groups."""
    with redirect_stdout(io.StringIO()) as said, suppress(SystemExit):
        import_module("lit_fed.command.start").main(["fit", "--help"])
    found: dict[str, Any] = {"help": "--algorithm" in said.getvalue()}
    fed, data_of, methods = (import_module(f"lit_fed{room}") for room in ("", ".data", ".methods"))
    for executor, method in (("sequential", methods.FedYogi), ("auto", methods.FedNova)):
        torch.manual_seed(0)
        data = data_of.Digits(num_clients=8, partition=data_of.Dirichlet(alpha=0.3))
        shape = data.input_shape
        task = fed.Classifier("mlp", num_classes=10, input_shape=shape) if executor == "sequential" else Measured()
        with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as said:
            trainer = fed.FederatedTrainer(
                max_rounds=2, local_epochs=1, accelerator="cpu", executor=executor, default_root_dir=folder
            )
            trainer.fit(task, data, method())
        found[executor] = digest(task)
        found[f"{executor} loss"] = float(trainer.metrics["global/loss"])
        found["groups"] = "trains clients in groups" in said.getvalue()
    names = import_module("lit_fed.private_names")
    module = torch.nn.Module()
    module.register_buffer("stays", torch.zeros(1))
    module.register_buffer("passing", torch.zeros(1), persistent=False)
    found["passing"] = sorted(names.passing_buffers(module))
    metric = torchmetrics.MeanMetric()
    metric.update(1.0)
    try:
        names.merge_states(metric, [{"mean_value": torch.tensor(3.0), "weight": torch.tensor(2.0)}] * 2)
        found["merged"] = float(metric.compute())
    except import_module("lit_fed.errors").ConfigError as error:
        found["merged"] = str(error)
    return found


def main() -> None:
    """Print the results with each set of names hidden; a set is names joined by commas, or ``none``."""
    warnings.simplefilter("ignore")  # of torch's old attributes, which a look at its module meets
    parser = argparse.ArgumentParser()
    parser.add_argument("sets", nargs="+")
    for names in parser.parse_args().sets:
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.close(reader)
            try:
                hide_all(names.split(","))
                answer: dict[str, Any] = results()
            except BaseException as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            with os.fdopen(writer, "w") as out:
                json.dump(answer | {"names": names, "asked": sorted(asked)}, out)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answers:
            print(answers.read(), flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
