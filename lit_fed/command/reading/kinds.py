"""Models of clients with different networks: ``model``, changed by ``trainer.kinds``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentError, Namespace
from lightning import LightningModule

from lit_fed.command.reading.making import instantiate
from lit_fed.command.reading.settings import TRAINED_BY, Settings
from lit_fed.command.refusals.explain import explain
from lit_fed.engine.method.kinds import CHOSEN_BY
from lit_fed.errors import ConfigError
from lit_fed.parsing import Parser


def models_by_kind(
    model: Namespace, kinds: Mapping[str, Any], max_rounds: int | None = None
) -> dict[str, LightningModule]:
    """Make the model of every kind, in order.

    Args:
        model: The model's configuration, complete.
        kinds: Settings of the model by kind, with the kind's clients or share.
        max_rounds: Length of a schedule whose length is null.

    Raises:
        ConfigError: For settings that the model does not have, or refuses.
    """
    if not kinds:
        raise ConfigError("trainer.kinds is empty; name at least one kind of network, or set it to null")
    return {name: _model(model, name, own, max_rounds) for name, own in kinds.items()}


def _model(model: Namespace, name: str, own: Any, max_rounds: int | None) -> LightningModule:
    if not isinstance(own, Mapping):
        raise ConfigError(f"trainer.kinds.{name} is {own!r}; it must hold settings of the model, and clients")
    shared = (model.get("init_args") or Namespace()).as_dict()
    changed = {key: value for key, value in own.items() if key not in CHOSEN_BY}
    plain = {key: value for key, value in changed.items() if key not in TRAINED_BY}
    merged = Settings()
    merged.content["model"] = {"class_path": model.class_path, "init_args": shared | plain}
    for key in TRAINED_BY.keys() & changed.keys():
        merged.put(("model", key), changed[key])
    parser = Parser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model", required=True)
    try:
        made: LightningModule = instantiate(parser, parser.parse_object(merged.finish()), max_rounds).model
    except ArgumentError as error:
        raise ConfigError(explain(error).replace("model.init_args.", f"trainer.kinds.{name}.", 1)) from error
    return made
