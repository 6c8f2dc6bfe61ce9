"""What Python sets is checked as what YAML sets, by the same annotations, where it is set."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from jsonargparse._parameter_resolvers import get_signature_parameters
from lightning import LightningDataModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lit_fed.arguments import Checked
from lit_fed.data import Digits, RandomCrop, Wrapped
from lit_fed.errors import CheckpointError, ConfigError, errors_name_options
from lit_fed.methods import FedAvg, FedProx
from lit_fed.participation import Stragglers, UniformParticipation
from lit_fed.trainer import LIGHTNINGS, FederatedTrainer
from tests.support import LeastSquares, Points, assert_same, fit, trainer, weights

ROOMS = (
    "callbacks",
    "codecs",
    "data",
    "methods",
    "participation",
    "privacy",
    "poses",
    "protocols",
    "robust",
    "tasks",
)
VALUES: list[Any] = [np.int64(3), np.float32(0.5), "3", None, dict, 2.5, True]
ATTACKS = ("ALIE", "Backdoor", "GaussianNoise", "InnerProduct", "LabelFlip", "Mimic", "Scaling", "SignFlip")
NEEDED: dict[str, dict[str, Any]] = {
    "ClientArrays": {"num_clients": 2, "stored_shape": [2]},
    "Domains": {"domains": {"a": Digits(), "b": Digits()}},
    "HuggingFace": {"name": "a/b", "inputs": "x", "target": "y"},
    "LEAF": {"name": "femnist"},
    "Table": {"path": "a.csv", "target": "y"},
    "Augmentation": {"transforms": [RandomCrop()]},
    "Listed": {"clients": [[0], [1]]},
    "Skeleton": {"joints": ("nose", "neck")},
    "Asynchronous": {"concurrency": 2},
    "Stragglers": {"deadline": 1.0},
    "PoissonParticipation": {"fraction": 0.5},
    "ClientLevel": {"clip_norm": 1.0, "noise_multiplier": 1.0},
    "SampleLevel": {"clip_norm": 1.0, "noise_multiplier": 1.0},
    "CentredClipping": {"radius": 1.0},
    "NormBounding": {"norm": 1.0},
    **{name: {"attackers": 1} for name in ("NNM", "Krum", "MultiKrum", "TrimmedMean")},
    "SecureSum": {"threshold": 3, "clip": 1.0},
    "ArrayFile": {"path": "a.npz"},
    **{name: {"fraction": 0.2} for name in ATTACKS},
    **{name: {"network": "mlp", "input_shape": (4,)} for name in ("Classifier", "Regressor")},
    "KeypointEstimator": {"num_joints": 2, "input_shape": (3, 32, 32), "flip_test": False},
    "Segmenter": {"input_shape": (3, 32, 32), "skeleton_edges": [(0, 1)], "joint_names": ["a", "b"]},
    "FederatedTrainer": {"accelerator": "cpu", "devices": 1},
}
"""Arguments without which a class cannot be made."""
BOUNDS = "at least|at most|above|below"


def public_classes() -> list[type]:
    """Every class with checked arguments that a user imports from a room."""
    found: dict[type, None] = {FederatedTrainer: None}
    for room in ROOMS:
        names = importlib.import_module(f"lit_fed.{room}")
        found |= {one: None for name, one in vars(names).items() if isinstance(one, type) and not name.startswith("_")}
    return [
        one
        for one in found
        if is_checked(one) and not inspect.isabstract(one) and one.__name__ not in ("Wrapped", "SummedSecurely")
    ]


def is_checked(one: type) -> bool:
    ours = one.__module__.startswith("lit_fed.")
    return ours and (issubclass(one, Checked) or hasattr(one.__init__, "__wrapped__"))


def parser_takes(hint: Any, value: Any) -> bool:
    """Whether YAML may hold a value for an annotation."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--x", type=hint)
    try:
        parser.parse_object({"x": value})
    except ArgumentError:
        return False
    return True


def arguments_of(one: type) -> list[tuple[str, Any]]:
    """The arguments of a class as YAML has them, with their annotations."""
    return [(parameter.name, parameter.annotation) for parameter in get_signature_parameters(one, "__init__")]


def holds_numpy(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(holds_numpy, value.values()))
    return any(map(holds_numpy, value)) if isinstance(value, list | tuple) else isinstance(value, np.generic)


def refusal(one: type, name: str, value: Any) -> str:
    """The line by which a class refuses a value of an argument; empty if it takes a plain value in its place."""
    try:
        made = one(**(NEEDED.get(one.__name__, {}) | {name: value}))
    except ConfigError as error:
        line = str(error)
    else:
        line = ""
        assert not holds_numpy(vars(made)), f"{name}={value!r}"
    assert "\n" not in line
    return line


@pytest.mark.parametrize("one", public_classes(), ids=lambda one: one.__name__)
def test_a_value_is_taken_as_a_plain_one_or_refused_in_one_line_as_yaml_refuses_it(one: type) -> None:
    assert one(**NEEDED.get(one.__name__, {})) is not None
    for name, hint in arguments_of(one):
        lines = {repr(value): refusal(one, name, value) for value in VALUES}
        for value in VALUES:
            plain = value.item() if isinstance(value, np.generic) else value
            line = lines[repr(value)]
            if isinstance(plain, bool | int | float) and hint not in (inspect.Parameter.empty, Literal[1, 2] | None):
                by_type = re.search(rf"[.]{name} is {re.escape(repr(value))}; it must be (?!{BOUNDS})", line)
                taken = parser_takes(hint, plain)
                assert not by_type if taken else line, f"{name}={value!r}: {line or 'taken'}"
            elif value == "3" and (hint in (int, float) or hint in (int | None, float | None)):
                assert f".{name} is '3'; it must be " in line or "exclude each other" in line
            elif value is dict and hint in (bool, int, float, str):
                assert f".{name} is the class dict; it must be " in line


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (lambda: FederatedTrainer(callbacks=["wandb"]), "trainer.callbacks[0] is 'wandb'; it must be a Callback"),
        (lambda: FederatedTrainer(logger="wandb"), "trainer.logger is 'wandb'; it must be True, False, a Logger or a"),
        (lambda: FederatedTrainer(participation=UniformParticipation), "trainer.participation is the class Uniform"),
        (lambda: FederatedTrainer(max_round=3), "FederatedTrainer takes no max_round; did you mean max_rounds?"),
        (lambda: FedAvg(wieghting="uniform"), "FedAvg takes no wieghting; did you mean weighting?"),
        (lambda: FedProx(mu=10**400), "algorithm.mu is 1000"),
        (
            lambda: trainer(Path()).fit(LeastSquares(), Points(), FedAvg),
            "algorithm is the class FedAvg; it must be an A",
        ),
        (
            lambda: trainer(Path()).fit(LeastSquares, Points(), FedAvg()),
            "model is the class LeastSquares; it must be a",
        ),
        (
            lambda: trainer(Path()).fit(LeastSquares(), Points(), FedAvg(), 3),
            "ckpt_path is 3; it must be a text or None",
        ),
        (lambda: setattr(trainer(Path()), "max_rounds", "5"), "max_rounds is '5'; it must be a whole number"),
        (lambda: setattr(trainer(Path()), "max_rounds", 0), "trainer.max_rounds is 0; it must be at least 1"),
    ],
)
def test_a_line_names_the_argument_and_what_it_must_be(made: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made()
    assert str(caught.value).startswith(line)


def test_what_is_no_population_is_wrapped_as_the_line_says(tmp_path: Path) -> None:
    samples = TensorDataset(torch.randn(20, 2), torch.randn(20))
    for other in (DataLoader(samples), samples, LightningDataModule()):
        with pytest.raises(ConfigError, match=r"it has no clients; wrap its data: lit_fed\.data\.Wrapped\(Lightning"):
            fit(tmp_path, data=other)
    with pytest.raises(ConfigError, match=r"data\.module is .*; it must be a LightningDataModule"):
        Wrapped(DataLoader(samples))  # type: ignore[arg-type]
    fit(tmp_path, data=Wrapped(LightningDataModule.from_datasets(samples, test_dataset=samples), num_clients=2))


def test_a_run_of_numpys_numbers_is_resumed(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"seed": np.int64(3), "local_epochs": np.float32(1), "evaluate_every": np.int32(1)}
    fit(tmp_path / "parts", max_rounds=np.int64(1), **numbers)
    parts = fit(tmp_path / "parts", max_rounds=np.int64(2), ckpt_path=Path("last"), **numbers)
    whole = fit(tmp_path / "whole", max_rounds=2, seed=3, local_epochs=1)
    assert parts.run.start_round == 1
    assert_same(weights(parts), weights(whole))


def test_a_run_whose_first_checkpoint_cannot_be_read_ends_before_training(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.settings = replace(made.settings, seed=np.int64(3))  # past the gate
    with pytest.raises(CheckpointError, match="not a checkpoint that can be loaded safely"):
        made.fit(LeastSquares(), Points(), FedAvg())
    assert made.run.next_round == 0


def test_a_users_own_subclass_annotates_as_it_likes() -> None:
    class Mine(FedProx):
        def __init__(self, level: int = 0, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.level = level

    assert Mine(level="high", mu=np.float32(0.5)).level == "high"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"algorithm\.mu is 'high'; it must be a number"):
        Mine(mu="high")


def test_checked_objects_are_copied_and_pickled_as_others() -> None:
    for made in (FedProx(mu=0.5), Stragglers(deadline=1.0), Points()):
        for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):  # noqa: S301  # our own
            assert type(copied) is type(made)
    assert inspect.signature(FedProx.__init__).parameters["mu"].annotation == "float"


def test_each_argument_of_lightnings_trainer_is_taken_or_refused_with_what_takes_its_place() -> None:
    theirs = inspect.signature(Trainer.__init__).parameters.keys() - {"self"}
    ours = inspect.signature(FederatedTrainer.__init__).parameters.keys()
    assert theirs - ours == LIGHTNINGS.keys() & theirs
    assert not LIGHTNINGS.keys() & ours
    for name in theirs - ours:
        with pytest.raises(ConfigError, match=f"FederatedTrainer takes no {name}; {re.escape(LIGHTNINGS[name])}"):
            FederatedTrainer(**{name: 1})


def test_hints_speak_the_callers_language() -> None:
    said = "set --trainer.seed 3, --ckpt_path last or null, not /data/null or --ntasks-per-node"
    assert str(ConfigError(said)) == "set trainer.seed 3, ckpt_path='last' or None, not /data/null or --ntasks-per-node"
    with errors_name_options():
        assert str(ConfigError(said)) == said
