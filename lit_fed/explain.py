"""What a parser's nested report boils down to: one line that names the culprit and says what to do.

jsonargparse reports as text only, an indented tree of every alternative that it tried. `explain` reads that tree from
the outside in: the keys give the place in the configuration, the innermost complaint gives the reason.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import yaml

_NOISE = re.compile(
    r"Does not validate against|Errors:|Given value type|Expected a <class 'NoneType'>|Expected a path but"
    r"|Subclass types expect|a class path \(str\)|a dict (with|without) "
)
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list", "str": "a text"}
_KINDS |= {"dict": "a mapping", "tuple": "a list"}
_SECTIONS = ("trainer", "model", "data", "algorithm", "ckpt_path", "config")
_MOST = 16  # names in a list that is still read


@dataclass
class _Report:
    """What a nested report says.

    Args:
        path: Keys from the outermost to the innermost.
        owner: Import path of the class whose settings the last key is among.
        bases: Classes of which the value may be.
        wanted: What would have been accepted, in words.
        given: The value, where it is a plain one.
        unknown: A key that does not exist.
        absent: Required keys that are not there.
        no_class: What was taken for a class and is none.
        malformed: A class was expected, and its class_path is missing.
        reasons: Whatever else the report says.
    """

    path: list[str] = field(default_factory=list)
    owner: str = ""
    bases: list[type] = field(default_factory=list)
    wanted: list[str] = field(default_factory=list)
    given: str | None = None
    unknown: str | None = None
    absent: list[str] = field(default_factory=list)
    no_class: str | None = None
    malformed: bool = False
    reasons: list[str] = field(default_factory=list)


def explain(message: str, args: Sequence[str] = ()) -> str:
    """Boil a parser's report down to one line.

    Args:
        message: What the parser said.
        args: The command line that it was said about.
    """
    for pattern, answer in (
        (r"unrecognized arguments: (.+)", _unrecognized),
        (r"(?:Subcommand|Group) '.+' does not accept option '([^']+)'", _misplaced),
        (r"Option '[^']+' is not accepted before subcommand '([^']+)'", _too_early),
        (r"Option '([^']+)' is not accepted$", _misplaced),
        (r"the following arguments are required: (.+)", _required),
        (r"expected \"subcommand\" to be one of \{(.+)\}", _no_command),
        (r"argument subcommand: invalid choice: '([^']*)'", _wrong_command),
        (r"Parser key \"config\":\s+(?:File does not exist|.*not readable).*'([^']+)'", _no_file),
        (r"Parser key \"config\":\s+Path is not a file: '([^']+)'", _no_file),
    ):
        match = re.match(pattern, message, re.DOTALL)
        if match:
            return answer(match.group(1))
    if message.startswith(("Problems parsing config", "Unexpected config")):
        return _broken_file(args) or _one_line(message)
    return _tell(_read(message))


# ---------------------------------------------------------------------- the nested report


def _read(message: str) -> _Report:
    report = _Report()
    for line in message.splitlines():
        text = line.strip().removeprefix("- ")
        made_of = re.match(r"Type (.+?) expects a function or a callable class: (.*)", text)
        if made_of:
            report.bases, text = list(_classes_in(made_of.group(1))), made_of.group(2)
            if text.startswith(("Parser key", "Option", "the following")):
                report.path.append("init_args")
        of_class = re.search(r"\. Got value: Namespace\(class_path='([^']+)'.*", text)
        if of_class:
            report.owner, text = of_class.group(1), text[: of_class.start()]
        if text and not _NOISE.match(text):
            _read_line(report, text)
    return report


def _read_line(report: _Report, text: str) -> None:
    if match := re.match(r'Parser key "([^"]+)"', text):
        report.path.append(match.group(1))
        report.bases = []
    elif match := re.match(r"Problem with given class_path '([^']+)'", text):
        report.owner = match.group(1)
        report.path.append("init_args")
    elif text.startswith("Subtypes: "):
        report.bases = list(_classes_in(text))
    elif match := re.match(r"Given value: (.*)", text):
        if report.given is None and not match.group(1).startswith(("NestedArg(", "Namespace(")):
            report.given = match.group(1).partition(". Got value: ")[0]
    elif match := re.match(r"Option '([^']+)' is not accepted", text):
        report.unknown = match.group(1)
    elif match := re.match(r"the following arguments are required: (.+?)(?:\. Got value: |$)", text):
        report.absent = match.group(1).split(", ")
    elif match := re.match(r"Expected a dot import path string: (\S+)", text):
        report.no_class = match.group(1)
    elif match := re.match(r"module '[^']+' has no attribute '[^']+'|No module named '([^']+)'", text):
        named = text.partition(". Got value: ")[2] or report.owner
        if match.group(1) and not named.startswith(match.group(1)):  # the class's own file imports what is not there
            report.reasons.append(f"{named} cannot be imported: {match.group(0)}")
        else:
            report.no_class = named
    elif match := re.match(r"Import path (\S+) does not correspond to a subclass", text):
        report.no_class = match.group(1)
    elif text.startswith("Not a valid subclass"):
        report.malformed = True
    elif match := re.match(r"Expected an? (.+?)(?:\. Got value: (.*))?$", text):
        report.wanted += [_kind(match.group(1))] if _kind(match.group(1)) not in report.wanted else []
        report.given = match.group(2) or report.given
    elif text not in report.reasons:
        report.reasons.append(text)


def _tell(report: _Report) -> str:
    inner = ".".join(report.path)
    key = inner.removesuffix(".init_args")
    if report.unknown == "class_path":
        return _beside_class_path(report, key)
    if report.unknown is not None:
        return _unknown_setting(f"{inner}.{report.unknown}", report)
    if report.absent:
        return f"{_and([f'{inner}.{name}' for name in report.absent])} missing; give it a value"
    choices = [cls for cls in _subclasses(report.bases) if cls not in report.bases] or report.bases
    if report.no_class is not None:
        close = _close_class(report.no_class, choices)
        if close or not report.wanted:
            return f"{key}: {_no_such_class(report.no_class, report.bases)}{_or_list(close, choices, report.no_class)}"
    if report.malformed and not report.wanted:
        return f"{key}: a class is needed; give class_path and init_args{_or_list([], choices)}"
    if report.wanted:
        a_class = (report.no_class or report.malformed) and "a number" not in report.wanted  # a number may be a tensor
        given = "" if report.given is None else f", not {report.given}"
        hint = f"; write {key}+={report.given}" if report.given in [cls.__name__ for cls in choices] else ""
        return f"{key}: expected {_or(report.wanted + (['a class'] if a_class else []))}{given}{hint}"
    return ": ".join(part for part in (key, _one_line(": ".join(report.reasons))) if part)


def _kind(kind: str) -> str:
    literal = re.match(r"(?:typing\.)?Literal\[(.+)\]", kind)
    if literal:
        return _or(literal.group(1).split(", "))
    name = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", kind)
    return _KINDS.get(name, name)


def _beside_class_path(report: _Report, key: str) -> str:
    """A mapping with class_path and keys other than init_args counts as a mapping of settings."""
    try:
        given = ast.literal_eval(report.given or "")
        stray = [name for name in given if name not in ("class_path", "init_args", "dict_kwargs")]
    except (ValueError, SyntaxError, TypeError):
        stray = []
    which = _and(stray).removesuffix(" is").removesuffix(" are") if stray else "a setting"
    homes = [_home for name in stray for _home in _homes().get(name, []) if not _home.startswith(key)]
    hint = f"did you mean {_or(homes[:3])}?" if homes else f"put it into {key}.init_args"
    return f"{key}: {which} cannot stand beside class_path; {hint}"


# ---------------------------------------------------------------------- keys


def _unknown_setting(key: str, report: _Report) -> str:
    name = key.rpartition(".")[2]
    owner = _import(report.owner)
    settings = _settings(owner) if owner else []
    homes = [home for home in _homes().get(name, []) if home != key]
    close = get_close_matches(name, settings, n=1)
    if homes:
        hint = f"did you mean {_or(homes[:3])}?"
    elif close:
        hint = f"did you mean {close[0]}?"
    elif spelt := get_close_matches(name, _homes(), n=1, cutoff=0.8):
        hint = f"did you mean {_or(_homes()[spelt[0]][:3])}?"
    else:
        hint = f"its settings are {', '.join(settings)}" if settings else "remove it"
    return f"unknown key {key}: {_short(report.owner)} has no such setting; {hint}"


def _unrecognized(words: str) -> str:
    options = [word for word in words.split() if word.startswith("-")]
    if not options:
        return f"unexpected word {words.split()[0]!r}; settings are given as --key value"
    key = options[0].lstrip("-").partition("=")[0]
    return f"unknown option {options[0].partition('=')[0]}; {_hint(key, '--')}"


def _misplaced(key: str) -> str:
    return f"unknown key {key}; {_hint(key)}"


def _hint(key: str, dashes: str = "") -> str:
    homes = _homes()
    full = [home for places in homes.values() for home in places]
    begun = [home for home in full if home.startswith(key)]
    found = homes.get(key.rpartition(".")[2]) or begun or get_close_matches(key, [*full, *_SECTIONS], n=1)
    return f"did you mean {_or([dashes + home for home in found[:3]])}?" if found else "see lit-fed fit --help"


def _required(names: str) -> str:
    keys = [name.partition(".")[2] or name for name in names.split(", ")]
    order = [key for key in ("model", "data", "algorithm") if key in keys]
    keys = order + [key for key in keys if key not in order]
    return f"{_and(keys)} missing; name a class with --{keys[0]} or in a file given with --config"


def _homes() -> dict[str, list[str]]:
    """Where each setting belongs: the full keys by the last part of the key."""
    from torch.optim import SGD, Adam

    from lit_fed.algorithm import Algorithm
    from lit_fed.client import ClientModule
    from lit_fed.data import FederatedDataModule, Partition
    from lit_fed.participation import Participation
    from lit_fed.trainer import FederatedTrainer

    homes: dict[str, list[str]] = {}
    places: list[tuple[str, list[type]]] = [
        ("trainer", [FederatedTrainer]),
        ("data.init_args", [FederatedDataModule]),
        ("data.init_args.partition.init_args", [Partition]),
        ("model.init_args", [ClientModule]),
        ("model.init_args.optimizer.init_args", [SGD, Adam]),
        ("algorithm.init_args", [Algorithm]),
        ("trainer.participation.init_args", [Participation]),
    ]
    for place, bases in places:
        for name in dict.fromkeys(name for cls in _subclasses(bases, abstract=True) for name in _settings(cls)):
            homes.setdefault(name, []).append(f"{place}.{name}")
    return homes


# ---------------------------------------------------------------------- commands and files


def _no_command(commands: str) -> str:
    return f"no command given; choose {_or([*commands.split(','), 'study'])}, as in: lit-fed fit --config my.yaml"


def _wrong_command(word: str) -> str:
    from lit_fed.cli import FederatedCLI

    commands = [*FederatedCLI.subcommands(), "study"]
    close = get_close_matches(word, commands, n=1)
    return f"there is no command {word!r}; " + (f"did you mean {close[0]}?" if close else f"choose {_or(commands)}")


def _too_early(command: str) -> str:
    return f"settings come after the command: lit-fed {command} --config my.yaml"


def _no_file(path: str) -> str:
    reason = "is a folder" if Path(path).is_dir() else "cannot be read" if Path(path).exists() else "does not exist"
    return f"config file {_shown(path)} {reason}"


def _broken_file(args: Sequence[str]) -> str:
    """The first of the given configuration files that is no YAML mapping, and why."""
    for before, word in zip(("", *args), args, strict=False):
        path = word.partition("=")[2] if word.startswith("--config=") else word if before in ("-c", "--config") else ""
        if not Path(path).is_file():
            continue
        try:
            content = yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
            return f"config file {path}{line}: {error.problem}"
        except (yaml.YAMLError, UnicodeDecodeError):
            return f"config file {path} is not a YAML text"
        if not isinstance(content, yaml.MappingNode):
            return f"config file {path} holds no settings; write keys such as trainer:, model:, data: and algorithm:"
    return ""


def _shown(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


# ---------------------------------------------------------------------- classes


def _import(path: str) -> type | None:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) else None


def _classes_in(text: str) -> Iterator[type]:
    """The classes whose import paths a type mentions; of a callable, those that it returns."""
    text = re.sub(r"Callable\[\[[^\]]*\], ", "", text)
    for path in re.findall(r"(?:\w+\.)+\w+", text):
        found = None if path.startswith(("typing.", "collections.")) else _import(path)
        if found is not None:
            yield found


def _subclasses(bases: Iterable[type], abstract: bool = False) -> Iterator[type]:
    """The bases and all that derive from them, as far as they are public and can be made."""
    todo, seen = list(bases), set()
    while todo:
        found = todo.pop(0)
        if found in seen:
            continue
        seen.add(found)
        todo += type.__subclasses__(found)
        if abstract or not (found.__name__.startswith("_") or inspect.isabstract(found)):
            yield found


def _settings(owner: type) -> list[str]:
    """The names that a class can be configured with, its bases' included."""
    names: dict[str, None] = {}
    for cls in owner.__mro__:
        if "__init__" not in vars(cls) or cls is object:
            continue
        try:
            parameters = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
        except (TypeError, ValueError):
            continue
        names |= dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break  # this constructor hands nothing on to its bases
    return [name for name in names if name != "params"]  # an optimizer's parameters come from the model


def _close_class(path: str, choices: Sequence[type]) -> list[str]:
    module, _, name = path.rpartition(".")
    close = get_close_matches(name, [cls.__name__ for cls in choices if cls.__name__ != path], n=1, cutoff=0.7)
    return close or [f"{module}.{word}" for word in get_close_matches(name, _names_in(module), n=1, cutoff=0.6)]


def _names_in(module: str) -> list[str]:
    try:
        return [name for name, value in vars(importlib.import_module(module)).items() if isinstance(value, type)]
    except (ImportError, ValueError):
        return []


def _no_such_class(path: str, bases: Sequence[type]) -> str:
    kind = bases[0].__name__ if bases else "class"
    return f"{path} is no {kind}" if _import(path) else f"there is no {kind} named {path!r}"


def _or_list(close: Sequence[str], choices: Sequence[type], path: str = "") -> str:
    if close:
        return f"; did you mean {close[0]}?"
    if 0 < len(choices) <= _MOST:
        return f"; there {'is' if len(choices) == 1 else 'are'} {', '.join(cls.__name__ for cls in choices)}"
    return "" if "." in path else "; a class of another package needs its full import path"


def _short(path: str) -> str:
    return path.rpartition(".")[2]


# ---------------------------------------------------------------------- words


def _or(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _and(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]} are" if len(words) > 1 else f"{words[0]} is"


def _one_line(text: str) -> str:
    return " ".join(text.split())
