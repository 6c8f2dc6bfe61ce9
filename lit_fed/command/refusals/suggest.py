"""Suggestions for an unknown key, option or class."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from lightning import LightningDataModule

from lit_fed.command.refusals.spelling import close, join_or
from lit_fed.command.roots import PARTS, PLACES
from lit_fed.errors import of_other_lightning, reason

_MOST = 16  # names in a list that is still readable
LIGHTNING = {
    "max_epochs": "trainer.max_rounds, and trainer.local_epochs within a round",
    "min_epochs": "trainer.max_rounds",
    "max_steps": "trainer.local_steps, batches a client trains on in a round",
    "min_steps": "trainer.local_steps, batches a client trains on in a round",
    "limit_val_batches": "data.val_fraction",
    "limit_test_batches": "data.max_test_samples",
    "limit_predict_batches": "data.max_test_samples",
    "overfit_batches": "data.max_train_samples",
    "val_check_interval": "trainer.evaluate_every, in rounds",
    "check_val_every_n_epoch": "trainer.evaluate_every, in rounds",
    "num_sanity_val_steps": "nothing: a step is always tried before the first round",
    "log_every_n_steps": "nothing: every round is logged",
    "benchmark": "torch.backends.cudnn.benchmark, in the module's own code",
    "inference_mode": "nothing: evaluation keeps no gradients",
    "use_distributed_sampler": "trainer.strategy: clients are spread over the devices",
    "profiler": "python -m cProfile -m lit_fed fit …",
    "detect_anomaly": "torch.autograd.set_detect_anomaly, in the module's own code",
    "plugins": "trainer.precision and trainer.strategy",
    "sync_batchnorm": "trainer.buffers",
    "seed_everything": "trainer.seed",
    "enable_model_summary": "lit-fed cost, which counts parameters",
}
"""Equivalents of settings that only Lightning's trainer has."""
_INNER = ("lightning.pytorch.demos", "lit_fed.engine.lightning.")  # modules whose classes users never name


# ---------------------------------------------------------------------- keys


def option(words: Sequence[str], command: str | None = None, known: Sequence[str] = ()) -> str:
    """Message about unknown options.

    Args:
        words: Words that the parser did not recognise.
        command: The command.
        known: Options of the command, if they differ from a run's.
    """
    options = [word for word in words if word.startswith("-")]
    if not options:
        return f"unexpected word {words[0]!r}; settings are given as --key value"
    name = options[0].partition("=")[0]
    return f"unknown option {name}; {_hint(name.lstrip('-'), command, known, '--')}"


def key(name: str, command: str | None = None, known: Sequence[str] = ()) -> str:
    """Message about an unknown key; arguments as of `option`."""
    return f"unknown key {name}; {_hint(name, command, known)}"


def setting(name: str, owner: type) -> str:
    """Message about a key that is not a setting of its class."""
    last, known = name.rpartition(".")[2], _settings(owner)
    if others := [cls.__name__ for cls in _owners(name) if cls.__module__.startswith("lit_fed.")]:
        hint = f"it is one of {join_or(others[:3])}"
    elif homes := [home for home in _homes().get(last, []) if home != name]:
        hint = f"did you mean {join_or(homes[:3])}?"
    elif meant := close(last, known):
        hint = f"did you mean {meant}?"
    elif meant := close(last, _homes(), 0.8):
        hint = f"did you mean {join_or(_homes()[meant][:3])}?"
    else:
        hint = f"its settings are {', '.join(known)}" if known else "remove it"
    return f"unknown key {name}: {owner.__name__} has no such setting; {hint}"


def beside_class_path(name: str, stray: Sequence[str]) -> str:
    """Message about keys beside class_path other than init_args."""
    homes = [home for key in stray for home in _homes().get(key, []) if not home.startswith(name)]
    hint = f"did you mean {join_or(homes[:3])}?" if homes else f"put it into {name}.init_args"
    return f"{name}: {' and '.join(stray)} cannot stand beside class_path; {hint}"


def _hint(name: str, command: str | None, known: Sequence[str], dashes: str = "") -> str:
    if known:  # a command without the options of a run
        meant = close(name, known)
        return f"did you mean --{meant}?" if meant else f"lit-fed {command} takes --{', --'.join(known)}"
    homes = _homes()
    full = [home for places in homes.values() for home in places]
    begun = [home for home in full if name and home.startswith(name)]
    sections = ["trainer", *PARTS, "ckpt_path", "config"]
    last = name.rpartition(".")[2]
    if last in LIGHTNING and last not in homes:
        return f"here it is {LIGHTNING[last]}"
    homes_found = homes.get(last) or begun or get_close_matches(name, [*full, *sections], n=1)
    homes_found = [home for home in homes_found if home != name]
    return (
        f"did you mean {join_or([dashes + home for home in homes_found[:3]])}?"
        if homes_found
        else f"see lit-fed {command} --help"
    )


def _owners(name: str) -> list[type]:
    """Classes that have a setting of this name at this place."""
    place, _, last = name.rpartition(".")
    return [cls for cls in _every_class(PLACES.get(place, ())) if last in _settings(cls)]


@cache
def _homes() -> dict[str, list[str]]:
    """Full keys of all settings, by the last part of the key."""
    homes: dict[str, list[str]] = {}
    for place, bases in PLACES.items():
        for name in dict.fromkeys(name for cls in _every_class(bases) for name in _settings(cls)):
            homes.setdefault(name, []).append(f"{place}.{name}")
    return homes


def settings_of_classes() -> list[str]:
    """Full keys of all settings of the parts of a run."""
    return sorted(home for places in _homes().values() for home in places)


# ---------------------------------------------------------------------- classes


def subclasses(bases: Sequence[type]) -> list[type]:
    """Public, concrete classes that derive from the bases; the bases themselves if there are none."""
    classes = [cls for cls in _every_class(bases) if not (cls.__name__.startswith("_") or inspect.isabstract(cls))]
    return [cls for cls in classes if cls not in bases] or list(bases)


def named_class(path: Any, bases: Sequence[type]) -> type | None:
    """The class with an import path, or the class with a short name that derives from the bases; None if neither."""
    if not isinstance(path, str):
        return None
    if "." not in path:
        found = [cls for cls in _every_class(bases) if cls.__name__ == path]
        return min(found, key=lambda cls: not cls.__module__.startswith("lit_fed."), default=None)
    try:
        return _import(path)
    except Exception:  # errors of a user's own module are reported by the parser
        return None


def no_class(path: str, bases: Sequence[type]) -> str:
    """Message about a path that is not one of the possible classes."""
    kind = bases[0].__name__ if bases else "class"
    module, meant = path.rpartition(".")[0], close_class(path, bases)
    hint = f"; did you mean {meant}?" if meant and meant != path else ""
    try:
        importlib.import_module(module or __name__)
    except Exception as error:  # whatever a user's own module raises
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return f"there is no module {module!r}, neither in this folder nor installed{hint}"
        return f"{path} cannot be imported: {reason(error)}"
    cls = _import(path)
    what = f"{path} does not derive from {kind}" if cls else f"there is no {kind} named {path!r}"
    if cls is not None and (advice := of_other_lightning(cls)):
        return advice
    if kind == "FederatedDataModule" and issubclass(cls or object, LightningDataModule):
        return f"{path} is a plain LightningDataModule; name Wrapped as the class, and {path} as its module"
    full = "" if "." in path else "; a class of another package needs its full import path"
    return what + (hint or choices(bases) or full)


def choices(bases: Sequence[type]) -> str:
    """List of the possible classes, if they are few."""
    names = [cls.__name__ for cls in subclasses(bases) if not inspect.isabstract(cls)]
    return f"; there {'is' if len(names) == 1 else 'are'} {', '.join(names)}" if 0 < len(names) <= _MOST else ""


def close_class(path: str, bases: Sequence[type]) -> str:
    """The class that is most similar to a path."""
    module, _, name = path.rpartition(".")
    if meant := close(name, [cls.__name__ for cls in subclasses(bases) if cls.__name__ != path], 0.7):
        return meant
    try:
        there = [name for name, value in vars(importlib.import_module(module)).items() if isinstance(value, type)]
    except (ImportError, ValueError, TypeError):
        return ""
    return f"{module}.{meant}" if (meant := close(name, there)) else ""


def imported(path: str) -> Any:
    """The object at an import path; None where there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError):  # a relative path, too
        return None


def _import(path: str) -> type | None:
    thing = imported(path)
    return thing if isinstance(thing, type) else None


def _every_class(bases: Iterable[type]) -> Iterator[type]:
    """The bases and all classes that derive from them, except internal ones."""
    todo, seen = list(bases), set()
    while todo:
        cls = todo.pop(0)
        if cls not in seen:
            seen.add(cls)
            todo += type.__subclasses__(cls)
            if cls in bases or not str(cls.__module__).startswith(_INNER):
                yield cls


def parameters_of(owner: Any) -> dict[str, inspect.Parameter]:
    """Parameters of a class's constructor, with its bases' as far as it passes keywords on, or of a function.

    Args:
        owner: Any object; one that cannot be called has none.
    """
    parameters_found: dict[str, inspect.Parameter] = {}
    for made in _constructors(owner):
        try:
            parameters = list(inspect.signature(made).parameters.values())[isinstance(owner, type) :]
        except (TypeError, ValueError):
            continue
        named = {
            parameter.name: parameter
            for parameter in parameters
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        parameters_found = named | parameters_found
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break  # no keywords are passed on to the bases
    return parameters_found


def _constructors(owner: Any) -> list[Any]:
    if isinstance(owner, type):
        return [vars(cls)["__init__"] for cls in owner.__mro__ if cls is not object and "__init__" in vars(cls)]
    return [owner] if callable(owner) else []


def _settings(owner: type) -> list[str]:
    """Names of the settings of a class; an optimizer's ``params`` come from the model."""
    return [name for name in parameters_of(owner) if name != "params"]
