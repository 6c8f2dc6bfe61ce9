"""Parts of a run from their settings: the data first, then the model with the settings that follow from the data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning import LightningModule, seed_everything
from torch.optim.lr_scheduler import LRScheduler

from lit_fed.checks import check_range
from lit_fed.command.reading.settings import TRAINED, Place, Settings
from lit_fed.command.refusals.explain import explain, missing
from lit_fed.command.refusals.spelling import join_or
from lit_fed.command.roots import PARTS
from lit_fed.engine.method.kinds import CHOSEN_BY
from lit_fed.errors import ConfigError, LitFedError, own_traceback, reason
from lit_fed.networks import NETWORKS, TEXT_NETWORKS
from lit_fed.parsing import ROUNDS, Parser
from lit_fed.trainer import FederatedTrainer


class ReadParts(NamedTuple):
    """ReadParts of a run; the model by kind of network if clients have different ones."""

    model: LightningModule | dict[str, LightningModule]
    data: Any
    algorithm: Any


def add_parts(parser: ArgumentParser) -> None:
    """Add the trainer's settings, and the model, the data and the algorithm by class; see `check_parts_given`."""
    parser.add_class_arguments(FederatedTrainer, "trainer", instantiate=False, sub_configs=True)
    for name, base in PARTS.items():
        parser.add_subclass_arguments(base, name, required=False)


def check_parts_given(settings: Namespace) -> None:
    """Refuse settings without a model, data or an algorithm: a configuration may be printed, or read, without them."""
    if absent := [name for name in PARTS if settings[name] is None]:
        raise ConfigError(missing(absent))


def build_parts(parser: ArgumentParser, settings: Namespace) -> tuple[ReadParts, Namespace]:
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
    if kinds == {}:
        raise ConfigError("trainer.kinds is empty; name at least one kind of network, or set it to null")
    models = kinds and {
        name: _model_of_kind(settings.model, name, model_settings, max_rounds) for name, model_settings in kinds.items()
    }
    left = ("data",) if models is None else ("data", "model")
    left_over = Namespace({key: value for key, value in settings.items() if key not in left})
    rest = instantiate(parser, left_over, max_rounds)
    return ReadParts(rest.model if models is None else models, data, rest.algorithm), rest


def _model_of_kind(model: Namespace, name: str, own: Any, max_rounds: int | None) -> LightningModule:
    """Make the model of a kind: the complete ``model``, changed by the kind's settings."""
    if not isinstance(own, Mapping):
        raise ConfigError(f"trainer.kinds.{name} is {own!r}; it must hold settings of the model, and clients")
    shared = (model.get("init_args") or Namespace()).as_dict()
    changed: dict[Place, Any] = {("model", key): value for key, value in own.items() if key not in CHOSEN_BY}
    plain = {place[-1]: value for place, value in changed.items() if place not in TRAINED}
    merged = Settings()
    merged.content["model"] = {"class_path": model.class_path, "init_args": shared | plain}
    for place in TRAINED.keys() & changed.keys():
        merged.put(place, changed[place], {})
    parser = Parser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model", required=True)
    try:
        made: LightningModule = instantiate(parser, parser.parse_object(merged.finish()), max_rounds).model
    except ArgumentError as error:
        raise ConfigError(
            explain(error, parser, merged.content).replace("model.init_args.", f"trainer.kinds.{name}.", 1)
        ) from error
    return made


def set_seed(trainer: Any) -> None:
    """Seed torch, so that the model's initial weights follow from ``trainer.seed``."""
    check_range("trainer.seed", trainer.seed, least=0, below=2**32)
    seed_everything(trainer.seed, verbose=False)


_FROM_DATA = (
    *("num_classes", "in_channels", "input_shape", "num_outputs", "num_joints", "flip_pairs", "skeleton_edges"),
    *("unscored_joints", "joint_names", "coco_ap", "oks_sigmas", "target_scale"),
)
"""Settings of a model that follow from the data if they are left open."""


def fill_from_data(model: Namespace, data: Any) -> None:
    """Fill in settings of the model that are left open and follow from the data."""
    init_args = model.get("init_args") or Namespace()
    for key in _FROM_DATA:
        shape = getattr(data, "output_shape", None)
        known = getattr(data, key, None) if key != "num_outputs" or shape is None else prod(shape)
        if key not in init_args or known is None:
            continue
        setting = init_args[key]
        if setting is None:
            init_args[key] = known
        elif (key == "num_classes" and setting < known) or (key == "num_joints" and setting != known):
            raise ConfigError(f"model.{key} is {setting}, but the data have {known} {key.removeprefix('num_')}")
    check_tokens(init_args, getattr(data, "vocab_size", None))


def check_tokens(init_args: Namespace, vocab_size: int | None) -> None:
    """Refuse one of our networks that cannot read text data.

    Args:
        init_args: The model's settings.
        vocab_size: Number of different tokens in the data; None for data other than text.
    """
    name = init_args.get("network")
    if vocab_size is None or not isinstance(name, str) or name not in NETWORKS:
        return
    if name not in TEXT_NETWORKS:
        raise ConfigError(
            f"model.network {name} reads numbers, and the data are token ids; choose {join_or([*TEXT_NETWORKS])}"
        )
    default = inspect.signature(NETWORKS[name]).parameters["vocab_size"].default
    known = (init_args.get("network_args") or {}).get("vocab_size", default)
    if isinstance(known, int) and known < vocab_size:
        raise ConfigError(
            f"model.network {name} knows {known} tokens, but the data have {vocab_size}; set network_args.vocab_size"
        )


# ---------------------------------------------------------------------- objects


def instantiate(parser: ArgumentParser, settings: Namespace, max_rounds: int | None = None) -> Namespace:
    """Make the objects that settings describe.

    Args:
        parser: The parser that read the settings.
        settings: The settings.
        max_rounds: Length of a schedule whose length is null.
    """
    failures: list[LitFedError] = []
    makers: list[tuple[Any, type, bool]] = [(partial(_make, failures), object, True)]
    if max_rounds is not None:
        makers.insert(0, (partial(_make_schedule, max_rounds, failures), LRScheduler, True))
    try:
        made: Namespace = parser.instantiate(settings, instantiators=makers)
    except Exception:  # the parser's report, with the failure in the middle of a tree
        if not failures:
            raise
    else:
        return made
    raise failures[0]


def _make(failures: list[LitFedError], class_type: type, *args: Any, **kwargs: Any) -> Any:
    try:
        return class_type(*args, **kwargs)
    except LitFedError as error:
        failures.append(error)
        raise
    except Exception as error:  # whatever a class's constructor raises
        refusal = ConfigError(f"{class_type.__name__} cannot be made: {reason(error)}", own_traceback(error))
        failures.append(refusal)
        raise refusal from error


def _make_schedule(max_rounds: int, failures: list[LitFedError], class_type: type, *args: Any, **kwargs: Any) -> Any:
    for name in ROUNDS:
        if name in kwargs and kwargs[name] is None and kwargs.get("epochs") is None:
            kwargs[name] = max_rounds  # OneCycleLR can be given epochs instead
        elif isinstance(kwargs.get(name), int) and kwargs[name] < 0:
            raise ConfigError(
                f"lr_scheduler.{name} is {kwargs[name]}; it must be a number of rounds, or null for all rounds"
            )
    return _make(failures, class_type, *args, **kwargs)
