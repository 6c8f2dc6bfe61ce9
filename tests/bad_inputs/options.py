"""Cases over the options of every command: wrong values of every setting of every class, and wrong keys."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from lit_fed.callbacks import Callback
from lit_fed.codecs import Codec
from lit_fed.command.roots import PLACES, import_named
from lit_fed.command.table import COMMANDS
from lit_fed.engine.evaluation.protocols import Protocol
from lit_fed.parsing import Parser
from lit_fed.trainer import FederatedTrainer
from tests.bad_inputs.judge import Case
from tests.bad_inputs.values import ENORMOUS, edges, wrong
from tests.support import ROOT, called_by_name

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
TINY = {
    "trainer.logger": "false",
    "trainer.enable_progress_bar": "false",
    "trainer.max_rounds": "1",
    "trainer.local_epochs": "null",
    "trainer.local_steps": "1",
    "trainer.callbacks": "null",
}


class Setting(NamedTuple):
    """A setting of a class: the options that choose the class, its own option, and what values it takes."""

    chosen: list[str]
    option: str
    hint: Any


def fit(*args: str, name: str = "fit") -> list[str]:
    """A command over the quickstart, for one round of one step."""
    given = {arg.partition("=")[0].lstrip("-") for arg in args if arg.startswith("--")}
    tiny = [f"--{key}={value}" for key, value in TINY.items() if key not in given]
    if "trainer.local_epochs" in given:
        tiny = [word for word in tiny if "local_steps" not in word]
    return [name, "-c", QUICKSTART, *tiny, *args]


@cache
def settings() -> list[Setting]:
    """All settings of all classes that a configuration may name."""
    import_named()
    found = []
    for place, bases in PLACES.items():
        owner = place.removesuffix(".init_args")
        classes = [FederatedTrainer] if bases == (FederatedTrainer,) else called_by_name(bases)
        for cls in classes:
            chosen = [] if cls is FederatedTrainer else _chosen(owner, cls)
            found += [Setting(chosen, f"--{place}.{name}", hint) for name, hint in _hints(cls)]
    for owner, base in (("trainer.callbacks", Callback), ("trainer.protocols", Protocol)):
        for cls in called_by_name([base]):
            chosen = [f"--{owner}+={_path(cls)}"]
            found += [Setting(chosen, f"--{owner}.init_args.{name}", hint) for name, hint in _hints(cls)]
    for owner in ("trainer.uplink_codec", "trainer.downlink_codec"):
        for cls in called_by_name([Codec]):
            found += [Setting(_chosen(owner, cls), f"--{owner}.init_args.{name}", hint) for name, hint in _hints(cls)]
    return found


def _chosen(owner: str, cls: type) -> list[str]:
    before = ["--algorithm.init_args.regularizer=Prox"] if owner.endswith("regularizer") else []
    return [*before, f"--{owner}={_path(cls)}"]


def _path(cls: type) -> str:
    return cls.__name__ if cls.__module__.startswith("lit_fed") else f"{cls.__module__}.{cls.__name__}"


@cache
def _hints(cls: type) -> list[tuple[str, Any]]:
    parser = Parser(exit_on_error=False)
    parser.add_class_arguments(cls, "c", fail_untyped=False)
    named = [(action.dest.removeprefix("c."), action) for action in parser._actions if action.dest.startswith("c.")]
    hints = [(name, getattr(action, "_typehint", None) or action.type) for name, action in named]
    return [(name, hint) for name, hint in hints if hint is not None and not name.endswith(".help")]


def wrong_values(draw: random.Random) -> Iterator[Case]:
    """A value that no setting of that type can have."""
    for setting in _shuffled(draw, settings()):
        if values := wrong(setting.hint):
            value = draw.choice(values)
            yield Case(f"{setting.option}={value!r:.60}", fit(*setting.chosen, f"{setting.option}={value}"))


def edge_values(draw: random.Random) -> Iterator[Case]:
    """A sign, a zero or a size that means nothing; those that mean something are `MEANINGFUL`."""
    for setting in _shuffled(draw, settings()):
        name = setting.option.rpartition(".")[2]
        values = [value for value in edges(setting.hint) if (name, value) not in MEANINGFUL]
        if values and _SIZE.search(name) and name not in _CAPS:
            values.append(ENORMOUS)
        if values:
            value = draw.choice(values)
            yield Case(f"{setting.option}={value}", fit(*setting.chosen, f"{setting.option}={value}"), status=(2, 1))


_SIZE = re.compile(r"size$|width$|hidden$|^num_|count$|length$|samples|shards|strata$")
_CAPS = ("batch_size", "test_batch_size", "shared_batch_size", "max_train_samples", "max_test_samples")
"""Sizes of which more than there are means all."""
_ZEROS = (
    "alpha",
    "alternations",
    "attackers",  # of a rule: it tolerates none
    "generator_steps",  # of FedGen: no generator
    "availability",  # every round is without a cohort, see tests/participation/test_samplers.py
    "beta",
    "calibration_fraction",
    "crop_padding",
    "divergence_weight",
    "dropout_after",
    "dropout_before",
    "epochs",
    "evaluate_every",
    "exponent",  # of a probability: all weigh alike
    "figure_seed",
    "gamma",
    "lam",
    "min_delta",
    "mu",
    "num_workers",
    "public_size",
    "seed",
    "sigma",  # of a skew: no noise; of clients' sizes: all alike
    "unseen_fraction",
    "val_fraction",
    "weight",
)
MEANINGFUL = {(name, "0") for name in _ZEROS}
"""Zeros that switch something off, and seeds."""


def wrong_words(draw: random.Random) -> Iterator[Case]:
    """Options that there are not, without a value, twice, before the command, and words that are none."""
    while True:
        option = draw.choice(settings()).option
        position = draw.randrange(3, len(option))
        letter = draw.choice("qxzé_-.")
        typo = option[:position] + letter + option[position + draw.randrange(2) :]
        command = draw.choice([*COMMANDS])
        yield draw.choice(
            [
                Case(f"typo {typo}", fit(f"{typo}=1")),
                Case(f"typo {typo} of {command}", [command, typo, "1"]),
                Case(f"no value for {option}", fit(option)),
                Case(f"{option} before the command", [option, "1", *fit()]),
                Case("a stray word", fit(draw.choice(["true", "fit", "é", "-", "=", "0"]))),
                Case("a command that is none", [command + letter, "-c", QUICKSTART]),
                Case(f"{command} of a key in a section of its own", [command, f"--{letter}{option[2:]}", "1"]),
                Case(f"a part that is deeper than it is: {option}.{letter}", fit(f"{option}.{letter}.x=1")),
            ]
        )


def own_options(draw: random.Random) -> Iterator[Case]:
    """Commands with options of their own, with values that are none."""
    study = str(ROOT / "configs/papers/feddr_plus/studies/feddr_plus_figures_2_to_5.yaml")
    figure = str(ROOT / "configs/papers/fedfrozen/simulations/fedfrozen_figure2.yaml")
    bad = ["x", "-1", "1.5", ".nan", str(10**30), "", "[1]", "{a: 1}"]
    while True:
        value = draw.choice(bad)
        options = {
            "study": ["--jobs", "--profile", "--only"],
            "simulate": ["--processes", "--simulate"],
            "cost": ["--trainer.max_rounds", "--model.init_args.num_classes"],
            "statistics": ["--bins", "--least", "--ranges", "--report"],
            "export": ["--ckpt_path", "--shape", "--dtype", "--onnx", "--modules", "--overwrite"],
            "configs": ["--folder"],
            "copy": ["--output", "--name"],
            "completion": ["--shell"],
        }
        name = draw.choice([*options])
        option = draw.choice(options[name])
        config = {"study": study, "simulate": figure, "cost": QUICKSTART, "statistics": QUICKSTART}.get(name)
        files = [] if config is None else ["-c", config]
        yield Case(f"{name} {option}={value!r}", [name, *files, f"{option}={value}"])


def _shuffled(draw: random.Random, items: list[Setting]) -> Iterator[Setting]:
    while True:
        yield from draw.sample(items, len(items))
