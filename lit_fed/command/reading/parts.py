"""Parts of a run from their settings: the data first, then the model with the settings that follow from the data."""

from __future__ import annotations

import inspect
from math import prod
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace
from lightning import LightningModule, seed_everything

from lit_fed.checks import check_range
from lit_fed.command.reading.kinds import models_by_kind
from lit_fed.command.reading.making import instantiate
from lit_fed.command.refusals.suggest import join_or
from lit_fed.command.roots import PARTS
from lit_fed.errors import ConfigError
from lit_fed.networks import NETWORKS, TEXT_NETWORKS
from lit_fed.trainer import FederatedTrainer


class Parts(NamedTuple):
    """Parts of a run; the model by kind of network if clients have different ones."""

    model: LightningModule | dict[str, LightningModule]
    data: Any
    algorithm: Any


def add_parts(parser: ArgumentParser, required: bool = True) -> None:
    """Add the trainer's settings, and the model, the data and the algorithm by class."""
    parser.add_class_arguments(FederatedTrainer, "trainer", instantiate=False, sub_configs=True)
    for name, base in PARTS.items():
        parser.add_subclass_arguments(base, name, required=required)


def build_parts(parser: ArgumentParser, settings: Namespace) -> tuple[Parts, Namespace]:
    """Make the data first, then the model with the settings that follow from the data.

    Args:
        parser: Parser with `add_parts`.
        settings: Its settings; the model's are completed in place.

    Returns:
        The parts, and all other settings, instantiated.
    """
    max_rounds = settings.trainer.get("max_rounds")
    data = instantiate(parser, Namespace(data=settings.data)).data
    fill_from_data(settings.model, data)
    kinds = settings.trainer.kinds
    models = None if kinds is None else models_by_kind(settings.model, kinds, max_rounds)
    left = ("data",) if models is None else ("data", "model")
    left_over = Namespace({key: value for key, value in settings.items() if key not in left})
    rest = instantiate(parser, left_over, max_rounds)
    return Parts(rest.model if models is None else models, data, rest.algorithm), rest


def set_seed(trainer: Any) -> None:
    """Seed torch, so that the model's initial weights follow from ``trainer.seed``.

    Raises:
        ConfigError: If the seed is out of range.
    """
    if not isinstance(trainer, Namespace):  # the parser accepts a lone value
        raise ConfigError(f"trainer is {trainer!r}; it must hold settings, such as max_rounds")
    check_range("trainer.seed", trainer.seed, least=0, below=2**32)
    seed_everything(trainer.seed, verbose=False)


_FROM_DATA = (
    *("num_classes", "in_channels", "input_shape", "num_outputs", "num_joints", "flip_pairs", "skeleton_edges"),
    *("unscored_joints", "joint_names", "coco_ap", "oks_sigmas"),
)
"""Settings of a model that follow from the data if they are left open."""


def fill_from_data(model: Namespace, data: Any) -> None:
    """Fill in settings of the model that are left open and follow from the data.

    Raises:
        ConfigError: If the model is set to fewer classes than the data have, or to another number of joints.
    """
    init_args = model.get("init_args") or Namespace()
    for key in _FROM_DATA:
        shape = getattr(data, "output_shape", None)
        known = getattr(data, key, None) if key != "num_outputs" or shape is None else prod(shape)
        if key not in init_args or known is None:
            continue
        told = init_args[key]
        if told is None:
            init_args[key] = known
        elif (key == "num_classes" and told < known) or (key == "num_joints" and told != known):
            raise ConfigError(f"model.{key} is {told}, but the data have {known} {key.removeprefix('num_')}")
    check_tokens(init_args, getattr(data, "vocab_size", None))


def check_tokens(init_args: Namespace, vocab_size: int | None) -> None:
    """Refuse one of our networks that cannot read text data.

    Args:
        init_args: The model's settings.
        vocab_size: Number of different tokens in the data; None for data other than text.

    Raises:
        ConfigError: For text and a network that reads numbers, or has a smaller vocabulary.
    """
    name = init_args.get("network")
    if vocab_size is None or not isinstance(name, str) or name not in NETWORKS:
        return
    if name not in TEXT_NETWORKS:
        raise ConfigError(
            f"model.network {name} reads numbers, and the data are token ids; choose {join_or([*TEXT_NETWORKS])}"
        )
    known = (init_args.get("network_args") or {}).get("vocab_size", _parameter(NETWORKS[name], "vocab_size"))
    if isinstance(known, int) and known < vocab_size:
        raise ConfigError(
            f"model.network {name} knows {known} tokens, but the data have {vocab_size}; set network_args.vocab_size"
        )


def _parameter(made: Any, name: str) -> Any:
    return inspect.signature(made).parameters[name].default
