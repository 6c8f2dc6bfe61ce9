"""One line from a parser's error: the key that is wrong, and what to do.

jsonargparse raises an error from its cause, link by link: a key, the class at that key, a key of the class, and so on
down to the reason. `_LINKS` holds the beginnings of links that are read here; a reason that it lacks is told as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from jsonargparse import ArgumentParser

from lit_fed.command.refusals import suggest
from lit_fed.command.refusals.spelling import join_and, join_or
from lit_fed.command.table import COMMANDS, asked
from lit_fed.errors import causes

# Patterns of links by kind; the first that matches counts.
_LINKS = (
    ("key", r'Parser key "([^"]+)":\s*((?s:.*))'),
    ("class", r"Problem with given class_path '([^']+)'"),
    ("maker", r"Type (.+?) expects a function or a callable class: (?s:.*)Got value: (?:\w+\(class_path=')?([^']*)"),
    ("union", r"Does not validate against any of the Union subtypes\nSubtypes: \[(.*)\]\n(?s:.*)\nGiven value: (.*)"),
    ("unknown", r"(?:Group '(.+)' does not accept option|Option) '([^']+)'"),
    ("absent", r"the following arguments are required: (.+)"),
    ("stray", r"unrecognized arguments: (.+)"),
    ("no_value", r"argument (\S+): expected (?:one|at least one) argument"),
    ("no_class", r"(?:Expected a dot import path string:|Import path) (\S+)"),
    ("abstract", r"Expected an instantiatable class, but (\S+) is abstract"),
    ("no_settings", r"Not a valid subclass of"),
    ("wanted", r"Expected an? (.+)\. Got value: (.*)"),
)
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list", "str": "a text"}
_KINDS |= {"dict": "a mapping", "tuple": "a list", "NoneType": ""}


def explain(
    error: BaseException,
    args: Sequence[str] = (),
    origin: Callable[[Sequence[str]], str | None] = lambda _keys: None,
    given: Callable[[Sequence[str]], Any] = lambda _keys: None,
) -> str:
    """Reduce a parser's error to one line.

    Args:
        error: The error.
        args: The command line that it is about.
        origin: File and line of a setting, given its keys; empty for an option's.
        given: The value as the file or the option has it, given its keys.
    """
    facts = _read(error)
    key, inner = ".".join(facts.keys), {"unknown": facts.what, "no_class": "class_path", "abstract": "class_path"}
    where = origin(f"{key}.{inner.get(facts.kind, '')}".strip(".").split("."))
    if facts.kind == "wanted" and isinstance(text := given(key.split(".")), str):
        facts.given = text
    if facts.kind == "unknown" and where == "" and not key:
        return suggest.option([f"--{facts.what}"], *_asked_for(args))
    line = _tell(facts, key, args)
    return f"{where}: {line}" if where else line


def _read(error: BaseException) -> SimpleNamespace:
    """Facts about a mistake: its keys, the class that has it, the types and the value there, and the reason."""
    facts = SimpleNamespace(keys=[], owner="", types="", given=None, kind="", what="")
    within, links = False, [(str(link), link) for link in causes(error)]
    several = links[-2][0] if len(links) > 1 and links[-1][0].startswith("Expected a ") else ""
    if meant := re.search(r"- (Problem with given class_path .*)\n +(.*)\n +(.*)", several):  # not the first type
        links[-1:] = [(text, error) for text in meant.groups() if any(re.match(pattern, text) for _, pattern in _LINKS)]
    for text, link in links:
        kind, match = next(((kind, m) for kind, pattern in _LINKS if (m := re.match(pattern, text))), ("", None))
        first, second, *_ = (*(match.groups("") if match else (text,)), "", "")
        if kind in ("key", "unknown", "absent") and within:
            facts.keys.append("init_args")
        elif kind == "key" and facts.keys and f"{first}.".startswith(f"{facts.keys[-1]}."):
            facts.keys.pop()  # the same link again, or its whole name
        within = kind in ("class", "maker")
        if kind == "key":
            facts.keys.append(first)
            facts.types, facts.given, facts.kind, facts.what = "", None, "", second
        elif kind == "class":
            facts.owner = first
        elif kind == "maker":
            facts.types, facts.owner = first, second
        elif kind == "union":
            facts.types, facts.given = first, second
        elif kind == "wanted":
            facts.kind, facts.what, facts.given = kind, first, second if facts.given is None else facts.given
        else:
            facts.kind, facts.what = kind, ".".join(filter(None, (first, second)))
        if isinstance(link, ModuleNotFoundError | AttributeError) and (missed := link.name):
            if facts.owner.startswith(missed) or facts.owner.endswith(f".{missed}"):
                facts.kind, facts.what = "no_class", facts.owner
            elif isinstance(link, ModuleNotFoundError):  # of the class's own module
                facts.what = f"{facts.owner} cannot be imported: {text}"
    return facts


def _tell(facts: SimpleNamespace, key: str, args: Sequence[str]) -> str:
    match facts.kind:
        case "unknown" if facts.what == "class_path":
            return suggest.beside_class_path(key.removesuffix(".init_args"), facts.given)
        case "unknown" if key:
            return suggest.setting(f"{key}.{facts.what}", facts.owner)
        case "unknown":
            return suggest.key(facts.what, *_asked_for(args))
        case "absent" if key:
            return f"{join_and([f'{key}.{name}' for name in facts.what.split(', ')])} missing; give it a value"
        case "absent":
            return missing(facts.what.split(", "), str(asked(args)))
        case "stray":
            return suggest.option(facts.what.split(), *_asked_for(args))
        case "no_value":
            return _no_value(facts.what, args)
        case "no_settings" if "'class_path':" in str(facts.given):
            return suggest.beside_class_path(key, facts.given)
        case "":
            return " ".join((f"{key}: {facts.what}" if key else facts.what).split())
    return f"{key}: {_of_type(facts, key)}"


def _of_type(facts: SimpleNamespace, key: str) -> str:
    """Reason why a value is not of its type."""
    bases, given = suggest.classes_in(facts.types), str(facts.given)
    meant = facts.kind == "wanted" and not suggest.named_class(given, bases) and suggest.close_class(given, bases)
    if facts.kind == "no_class" or meant:
        return suggest.no_class(facts.what if facts.kind == "no_class" else given, bases)
    if facts.kind == "abstract" and facts.what in given:  # else it is the base, where no class is given
        return f"{facts.what} is abstract; name a class that derives from it{suggest.choices(bases)}"
    if facts.kind in ("abstract", "no_settings"):
        return f"a class is needed; give class_path and init_args{suggest.choices(bases)}"
    hint = f"; write {key}+={given}" if given in [cls.__name__ for cls in suggest.subclasses(bases)] else ""
    return f"expected {join_or(_kinds(facts.types or facts.what))}, not {given or repr(given)}{hint}"


def _kinds(types: str) -> list[str]:
    """Types in words, classes last, and none where a number will do: it would be torch's Tensor."""
    while (outer := re.sub(r"(?<!Literal)\[[^\[\]]*\]", "", types)) != types:
        types = outer
    kinds: list[str] = []
    for literal, name in re.findall(r"Literal\[([^\]]+)\]|([\w.]+)(?:'>)?(?:, |$)", types):
        kinds += literal.split(", ") if literal else [_KINDS.get(name, "a class" if "." in name else name)]
    known = [kind for kind in dict.fromkeys(kinds) if kind and kind != "a class"]
    return [*known, *["a class"] * ("a class" in kinds and "a number" not in known)]


# ---------------------------------------------------------------------- commands


def missing(names: Sequence[str], command: str = "") -> str:
    """Message about missing parts of a run, or missing options of a command."""
    keys = suggest.in_order([name.removeprefix(f"{command}.") for name in names])
    if not suggest.are_parts(keys):
        options = _own_options([command])
        shown = [f"--{key}" if key in options or not options else key.upper() for key in keys]
        return f"{join_and(shown)} missing; see lit-fed {command} --help"
    return f"{join_and(keys)} missing; name a class with --{keys[0]} or in a file given with --config"


def _asked_for(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """The command, and its options if they differ from a run's."""
    return asked(args), _own_options(args)


def _own_options(args: Sequence[str]) -> list[str]:
    """Options of a command that does not take a run's options."""
    command = asked(args)
    if command is None or not COMMANDS[command].room_of(args):
        return []
    parser = ArgumentParser()
    COMMANDS[command].load(args).add_arguments(parser)
    names = list(parser.get_defaults().keys())
    words = [action.dest for action in parser._actions if not action.option_strings]
    return [] if "trainer.max_rounds" in names else [name for name in names if name not in words] or ["help"]


def _no_value(option: str, args: Sequence[str]) -> str:
    """Message about an option without a value; the parser names only the option's first part."""
    name = option.rpartition("/")[2]
    for word, following in zip(args, (*args[1:], ""), strict=False):
        if word.startswith((name, option.partition("/")[0])) and "=" not in word and following[:1] in ("", "-"):
            is_value = following and not following.startswith("--")
            hint = f"; write {word}={following}, since it begins with -" if is_value else ""
            return f"{word} needs a value{hint}"
    return f"{name} needs a value"
