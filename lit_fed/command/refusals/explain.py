"""One line about settings that the parser refuses: the key that is wrong, and what to do.

The parser is asked again about each setting alone, then about the settings inside, until the smallest part that it
refuses is found. The parser's own words are shown only where they say more than the type of that part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from lit_fed.command.refusals import suggest
from lit_fed.command.refusals.spelling import join_and, join_or
from lit_fed.errors import causes
from lit_fed.parsing import Parser

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_OF_CLASS = ("class_path", "init_args", "dict_kwargs")

_PLAIN = (int, float, str, list, tuple, dict, set, type(None))

Fault = tuple[str, str]
"""The key of a faulty part, and the line about it; an empty line for a key that the command does not take."""


def explain(
    error: BaseException,
    parser: ArgumentParser,
    settings: Mapping[str, Any],
    command: str | None = None,
    origin: Callable[[Sequence[str]], str | None] = lambda _keys: None,
) -> str:
    """Reduce a parser's error about settings to one line.

    Args:
        error: The error.
        parser: The parser.
        settings: The settings that it refused.
        command: The command that they are for.
        origin: File and line of a setting, given its keys; empty for an option's.
    """
    key, line = next(_of_settings(parser, settings, ""), ("", words_of(error)))
    where = origin(key.split("."))
    if not line:
        asked_for = command, _own_options(parser)
        line = suggest.key(key, *asked_for) if where != "" else suggest.option([f"--{key}"], *asked_for)
    return f"{where}: {line}" if where else line


def explain_words(error: BaseException, parser: ArgumentParser, words: Sequence[str], command: str | None) -> str:
    """Reduce a parser's error about a command's own words to one line; arguments as of `explain`."""
    options = {name: action.dest for action in parser._actions for name in action.option_strings}
    plain = [word for before, word in pairwise(("", *words)) if word[:1] != "-" and before not in options]
    last = causes(error)[-1]
    if isinstance(last, ArgumentError) and last.argument_name:
        return _no_value(last.argument_name, words) or words_of(last)
    if isinstance(last, ArgumentError):  # about words that no option takes
        unknown = [word for word in words if word.startswith("-") and word.partition("=")[0] not in options]
        return suggest.option(unknown or plain[-1:], command, _own_options(parser))
    pairs = [word.partition("=")[::2] if "=" in word else (word, value) for word, value in pairwise((*words, ""))]
    given = {options[option]: value for option, value in pairs if option in options}
    given |= zip([one.dest for one in parser._actions if not one.option_strings], plain, strict=False)
    absent = [action for action in parser._actions if action.required and action.dest not in given]
    if (fault := next(_of_settings(parser, given, ""), None)) or not absent:
        return fault[1] if fault else words_of(error)
    return missing([f"--{one.dest}" if one.option_strings else one.dest.upper() for one in absent], str(command))


def words_of(error: BaseException) -> str:
    """The innermost cause of an error, in the parser's own words."""
    return " ".join(str(causes(error)[-1]).split())


# ---------------------------------------------------------------------- settings


def _of_settings(
    parser: ArgumentParser, settings: Mapping[str, Any], key: str, owner: type | None = None
) -> Iterator[Fault]:
    """Faults of settings, of a class or of the command, below a key."""
    known = [action.dest for action in parser._actions if not action.dest.endswith(".help")]
    groups = {name.rpartition(".")[0] for name in known}
    for name, value in settings.items():
        if isinstance(value, dict) and value and (name in groups or not (owner or name in known)):
            yield from _of_settings(parser, {f"{name}.{inner}": part for inner, part in value.items()}, key)
        else:
            yield from _of_setting(parser, name, value, f"{key}.{name}".strip(".+"), owner)


def _of_setting(parser: ArgumentParser, name: str, value: Any, key: str, owner: type | None = None) -> Iterator[Fault]:
    """Faults of a setting: those inside it first, then the value as a whole."""
    try:
        parser.validate(Namespace({name: value}), skip_required=True)
    except KeyError:
        yield key, suggest.setting(key, owner) if owner else ""
    except TypeError as error:
        action = next(action for action in parser._actions if action.dest == name.removesuffix("+"))
        hint = getattr(action, "_typehint", None)  # without it, the parser's words are shown
        for one in _members(hint):
            if isinstance(value, list) and _kinds(one) == ["a list"] and get_args(one):
                of_entry = Parser(exit_on_error=False)
                of_entry.add_argument("--entry", type=get_args(one)[0])
                yield from (fault for entry in value for fault in _of_setting(of_entry, "entry", entry, key))
        yield from _of_value(value, hint, key, parser.get_defaults().get(name))
        yield key, f"{key}: {words_of(error)}"


def _of_value(value: Any, hint: Any, key: str, default: Any) -> Iterator[Fault]:
    """Faults of a value of another type, or of a class."""
    bases, members, text = _classes(hint), _members(hint), str(value)
    kinds = list(dict.fromkeys(kind for one in members for kind in _kinds(one)))
    known = suggest.named_class(text, bases)
    if bases and isinstance(value, dict):
        yield from _of_class(value, hint, key, default)
    elif bases and not isinstance(value, list) and (not kinds or (not known and suggest.close_class(text, bases))):
        yield from _of_class({"class_path": text}, hint, key, default)
    if bases and not kinds:
        yield key, f"{key}: a class is needed; give class_path and init_args{suggest.choices(bases)}"
    elif kinds:
        if "a number" not in kinds and [one for one in members if _classes(one) and not _kinds(one)]:
            kinds.append("a class")  # beside a number, it is torch's Tensor
        hint = f"; write {key}+={text}" if known in suggest.subclasses(bases) else ""
        if kinds == ["a text"] and isinstance(value, bool | int | float):  # such as YAML's 1, yes and 1.0
            hint = "; put it in quotation marks"
        yield key, f"{key}: expected {join_or(kinds)}, not {text or repr(text)}{hint}"


def _of_class(value: dict[str, Any], hint: Any, key: str, default: Any) -> Iterator[Fault]:
    """Faults of a class with its settings."""
    bases = _classes(hint)
    path = value.get("class_path") or (default or {}).get("class_path")
    cls = bases[0] if path is None else suggest.named_class(path, bases)
    if stray := [name for name in value if name not in _OF_CLASS] if "class_path" in value else []:
        yield key, suggest.beside_class_path(key, stray)
    if not isinstance(path, str | None) or (path is None and (len(bases) > 1 or inspect.isabstract(cls))):
        return
    if cls is None or not issubclass(cls, tuple(bases)):
        yield f"{key}.class_path", f"{key}: {suggest.no_class(str(path), bases)}"
    elif inspect.isabstract(cls):
        yield (
            f"{key}.class_path",
            f"{key}: {path} is abstract; name a class that derives from it{suggest.choices(bases)}",
        )
    else:
        given = next((len(get_args(one)[0]) for one in _members(hint) if get_origin(one) is Callable), 0)
        settings = value.get("init_args", {} if "class_path" in value else value) or {}
        parser = Parser(exit_on_error=False)
        parser.add_class_arguments(cls, skip={given}, fail_untyped=False)
        yield from _of_settings(parser, settings, f"{key}.init_args", cls)
        absent = [action.dest for action in parser._actions if action.required and settings.get(action.dest) is None]
        if absent:
            yield key, f"{join_and([f'{key}.init_args.{name}' for name in absent])} missing; give it a value"


# ---------------------------------------------------------------------- types


def _members(hint: Any) -> list[Any]:
    """The types of a union, or the type alone."""
    return (
        [one for part in get_args(hint) for one in _members(part)] if get_origin(hint) in (Union, UnionType) else [hint]
    )


def _classes(hint: Any) -> list[type]:
    """Classes that a type mentions, built-in ones left out; of a callable, the classes that it returns."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is not None:
        return [cls for part in (inner[1:] if origin is Callable else inner) for cls in _classes(part)]
    return [hint] if isinstance(hint, type) and not issubclass(hint, _PLAIN) else []


def _kinds(hint: Any) -> list[str]:
    """A type in words; none for a class."""
    origin = get_origin(hint) or hint
    if origin is Literal:
        return [*map(repr, get_args(hint))]
    if origin in _KINDS:
        return [_KINDS[origin]]
    if (not get_args(hint) and origin not in (list, tuple, dict)) or origin is Callable:
        return []
    return ["a mapping" if issubclass(origin, Mapping) else "a list"]


# ---------------------------------------------------------------------- commands


def missing(names: Sequence[str], command: str = "") -> str:
    """Message about missing options of a command, or without a command about missing parts of a run."""
    if command:
        return f"{join_and(names)} missing; see lit-fed {command} --help"
    return f"{join_and(names)} missing; name a class with --{names[0]} or in a file given with --config"


def _own_options(parser: ArgumentParser) -> list[str]:
    """Options of a command that does not take a run's options."""
    positional = [action.dest for action in parser._actions if not action.option_strings]
    names = [name for name, _ in parser.get_defaults().items() if name not in positional]
    return [] if "trainer.max_rounds" in names else names or ["help"]


def _no_value(option: str, words: Sequence[str]) -> str:
    """Message about an option without a value, of which the parser names the first part only; empty if it has one."""
    for word, following in pairwise((*words, "")):
        if word.startswith(tuple(option.split("/"))) and "=" not in word and following[:1] in ("", "-"):
            is_value = following and not following.startswith("--")
            hint = f"; write {word}={following}, since it begins with -" if is_value else ""
            return f"{word} needs a value{hint}"
    return ""
