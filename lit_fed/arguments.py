"""Arguments in Python, checked where they are set by the annotations that the parser reads.

A value that fits becomes a plain one: NumPy's numbers become Python's, so that a run can read what it writes.
"""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from lit_fed.errors import ConfigError, of_other_lightning

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
ClassT = TypeVar("ClassT", bound=type)

_WORDS = {int: "a whole number", float: "a number", str: "a text", type(None): "null"}
_LONGEST = 80  # characters of a value in a message


class Checked:
    """Base of classes whose constructors check their arguments.

    Only constructors of this package check: a user's subclass may annotate as it likes, and what it passes on is
    checked.
    """

    _refused_as: ClassVar[str] = ""
    """The word by which messages call objects of the class, such as ``trainer``; empty for the class's name."""

    _not_taken: ClassVar[Mapping[str, str]] = {}
    """Arguments of others that users may look for here, with what takes their place."""

    @classmethod
    def advice(cls, odd: Any) -> str:
        """The remedy for an argument that must be of this class and is another object; empty for the usual words."""
        return ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            checked_class(cls)


def checked_class(cls: ClassT) -> ClassT:
    """Have a class of this package check its constructor's arguments: a decorator for dataclasses."""
    if cls.__module__.partition(".")[0] == "lit_fed":
        cls.__init__ = checked(cls.__init__)  # type: ignore[misc]
    return cls


def checked(function: FunctionT) -> FunctionT:
    """Check the arguments of a method; a `ConfigError` names the first that does not fit."""

    @wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        signature, hints = _annotated(function)
        owner = getattr(self, "_refused_as", "") or type(self).__name__
        prefix = f"{owner}." if function.__name__ == "__init__" else ""
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            _refuse_unknown(type(self), signature, kwargs)
            raise
        for name, value in bound.arguments.items():
            if name in hints and value is not signature.parameters[name].default:
                bound.arguments[name] = _fitted(value, hints[name], f"{prefix}{name}")
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


@cache
def _annotated(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """A function's signature, and the types of its named arguments."""
    signature = inspect.signature(function)
    named = [one.name for one in signature.parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    return signature, {name: hint for name, hint in get_type_hints(function).items() if name in named}


def _refuse_unknown(cls: type, signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    for name in given.keys() - signature.parameters.keys():
        instead = getattr(cls, "_not_taken", {}).get(name)
        constructors = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
        close = get_close_matches(
            name, [known for one in constructors for known in inspect.signature(one).parameters], 1
        )
        hint = instead or (f"did you mean {close[0]}?" if close else "leave it out")
        raise ConfigError(f"{cls.__name__} takes no {name}; {hint}")


class _Unfit(Exception):
    """A value that is not of its type: its place within the argument, its type, and itself."""


def _fitted(value: Any, hint: Any, key: str) -> Any:
    try:
        return _fit(value, hint, "")
    except _Unfit as unfit:
        place, wanted, odd = unfit.args
    text = " ".join(repr(odd).split())
    given = f"{text[:_LONGEST]}…" if len(text) > _LONGEST else text
    if isinstance(odd, type):
        given = f"the class {odd.__name__}"
    advice = wanted.advice(odd) if isinstance(wanted, type) and issubclass(wanted, Checked) else ""
    needed = of_other_lightning(type(odd)) or advice or f"it must be {_described(wanted)}"
    raise ConfigError(f"{key}{place} is {given}; {needed}")


def _fit(value: Any, hint: Any, place: str) -> Any:
    """The value as its type has it; raises `_Unfit` if it is of another type."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Any or isinstance(origin, TypeVar):
        return value
    if origin in (Union, types.UnionType):
        return _fit_any(value, hint, place)
    if origin is Literal:
        fits = [one for one in inner if one == value and isinstance(one, bool) == isinstance(value, bool | np.bool_)]
        if fits:
            return fits[0]
    elif origin is bool:
        if isinstance(value, bool | np.bool_):
            return bool(value)
    elif origin in (int, float):
        numbers: Any = Integral if origin is int else Real
        if isinstance(value, numbers) and not isinstance(value, bool):
            with suppress(OverflowError):  # of a whole number beyond all floats
                as_float = float(value)
                return int(value) if isinstance(value, Integral) else as_float
    elif origin is str:
        if isinstance(value, str | os.PathLike):
            return str(value) if isinstance(value, np.str_ | os.PathLike) else value
    elif origin is Callable:
        if callable(value):
            return value
    elif isinstance(value, np.ndarray) and origin in (list, Sequence):
        return _fit(value.tolist(), hint, place)
    elif inner and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            fitted = {
                _fit(key, inner[0], place): _fit(one, inner[1], f"{place}[{key!r}]") for key, one in value.items()
            }
            return fitted if any(fitted[key] is not one for key, one in value.items()) else value
    elif inner and issubclass(origin, list | tuple | Sequence):
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return _fit_entries(value, hint, place)
    elif isinstance(value, origin):
        return value
    raise _Unfit(place, hint, value)


def _fit_any(value: Any, hint: Any, place: str) -> Any:
    """The value as the first type that it fits; an entry within it that does not fit tells more than the whole."""
    inside = _Unfit(place, hint, value)
    for one in get_args(hint):
        try:
            return _fit(value, one, place)
        except _Unfit as unfit:
            inside = unfit if unfit.args[0] != place else inside
    raise inside


def _fit_entries(value: Sequence[Any], hint: Any, place: str) -> Any:
    """A list or a tuple, the same object if nothing in it changes."""
    origin, inner = get_origin(hint), get_args(hint)
    fixed = origin is tuple and inner[-1:] != (...,)
    if fixed and len(value) != len(inner):
        raise _Unfit(place, hint, value)
    kinds = inner if fixed else inner[:1] * len(value)
    fitted = [_fit(one, kind, f"{place}[{at}]") for at, (one, kind) in enumerate(zip(value, kinds, strict=True))]
    made = tuple(fitted) if origin is tuple or (origin is not list and isinstance(value, tuple)) else fitted
    same = isinstance(value, origin) and all(new is old for new, old in zip(fitted, value, strict=True))
    return value if same else made


def _described(hint: Any) -> str:
    """A type in words."""
    *others, last = dict.fromkeys(_kinds(hint))
    return f"{', '.join(others)} or {last}" if others else last


def _kinds(hint: Any) -> list[str]:
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return [kind for one in inner for kind in _kinds(one)]
    if origin is bool:
        return ["True", "False"]
    if origin is Literal:
        return [repr(choice) for choice in inner]
    if origin is Callable:
        return ["a function or a class"]
    if inner and issubclass(origin, Mapping):
        return [f"a mapping from names to {_described(inner[1])}"]
    if inner and issubclass(origin, Sequence):
        fixed = origin is tuple and inner[-1:] != (...,)
        return [
            f"a list of {', '.join(map(_described, inner))}" if fixed else f"a list, each entry {_described(inner[0])}"
        ]
    return [_WORDS.get(origin) or f"{'an' if origin.__name__[0] in 'AEIOU' else 'a'} {origin.__name__}"]
