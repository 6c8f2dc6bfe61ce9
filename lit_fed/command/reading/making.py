"""Objects from settings: a class that cannot be made is named in one line; open-ended schedules get the rounds."""

from __future__ import annotations

from functools import partial
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from torch.optim.lr_scheduler import LRScheduler

from lit_fed.errors import ConfigError, LitFedError, own_traceback, reason
from lit_fed.parsing import ROUNDS


def instantiate(parser: ArgumentParser, settings: Namespace, max_rounds: int | None = None) -> Namespace:
    """Make the objects that settings describe.

    Args:
        parser: The parser that read the settings.
        settings: The settings.
        max_rounds: Length of a schedule whose length is null.

    Raises:
        ConfigError: In one line with the class and its error; ``details`` holds the traceback if the error comes from
            code that is neither ours nor installed.
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
        told = ConfigError(f"{class_type.__name__} cannot be made: {reason(error)}")
        told.details = own_traceback(error)
        failures.append(told)
        raise told from error


def _make_schedule(max_rounds: int, failures: list[LitFedError], class_type: type, *args: Any, **kwargs: Any) -> Any:
    for name in ROUNDS:
        if (
            name in kwargs and kwargs[name] is None and kwargs.get("epochs") is None
        ):  # OneCycleLR can be given epochs instead
            kwargs[name] = max_rounds
        elif isinstance(kwargs.get(name), int) and kwargs[name] < 0:
            raise ConfigError(
                f"lr_scheduler.{name} is {kwargs[name]}; it must be a number of rounds, or null for all rounds"
            )
    return _make(failures, class_type, *args, **kwargs)
