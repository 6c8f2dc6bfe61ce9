"""Options and parts of a run, for the commands of a federation over several machines."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from jsonargparse import ArgumentParser, Namespace

from lit_fed.command.reading.parts import ReadParts, add_parts, build_parts, instantiate, set_seed
from lit_fed.command.refusals.explain import missing
from lit_fed.command.roots import PARTS
from lit_fed.command.table import Call
from lit_fed.data import FederatedDataModule
from lit_fed.errors import ConfigError
from lit_fed.statistics.noise import Noise
from lit_fed.trainer import FederatedTrainer


class Made(NamedTuple):
    """A trainer with the run's settings, and the run's parts."""

    trainer: FederatedTrainer
    parts: ReadParts


def add_run(parser: ArgumentParser, required: bool = True) -> None:
    """Add the options of a run: the same as of ``fit``."""
    parser.add_argument("-c", "--config", action="config", help="configuration of the run, the same on every machine")
    add_parts(parser, required)


def make(call: Call, own: Collection[str]) -> Made:
    """Make the parts of a run, with the model's initial weights from the run's seed.

    Args:
        call: The command's settings.
        own: Keys of the command's own settings, which are not part of the run.
    """
    settings, parser = call.settings, call.parser
    if absent := [name for name in PARTS if settings[name] is None]:
        raise ConfigError(missing(absent))
    set_seed(settings.trainer)
    parts, rest = build_parts(parser, settings)
    trainer = FederatedTrainer(**rest.trainer)
    config = settings.clone()
    for key in ("config", *own):
        config.pop(key, None)
    trainer.describe(parser.dump(config, skip_unset=False, skip_validation=True))
    return Made(trainer, parts)


class MadeData(NamedTuple):
    """The data of a run for statistics, which may have missing numbers, and what statistics need of the rest."""

    data: FederatedDataModule
    noise: Noise | None
    seed: int
    config: str


def make_data(call: Call, own: Collection[str]) -> MadeData:
    """Make the data alone, and set aside what the method asks for if there is one."""
    settings, parser = call.settings, call.parser
    if settings.data is None:
        raise ConfigError(missing(["data"]))
    named = {key: settings[key] for key in ("trainer", "data", "algorithm") if settings.get(key) is not None}
    made = instantiate(parser, Namespace(**named), settings.trainer.get("max_rounds"))
    made.data.keeps_missing = True
    if "algorithm" in named:
        made.data.reserve(made.algorithm.public_size, made.algorithm.calibration_fraction)
    config = settings.clone()
    for key in ("config", *own):
        config.pop(key, None)
    dumped = parser.dump(config, skip_unset=False, skip_validation=True)
    return MadeData(made.data, Noise.of(made.trainer.privacy), made.trainer.seed, dumped)
