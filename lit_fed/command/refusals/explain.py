"""One line from a parser's nested report: the key that is wrong, and what to do.

jsonargparse reports errors as text only, also in 4.53: an indented tree of every alternative that it tried. `_PHRASES`
and `_FLAT` hold all of its English that is read here; keys give the place in the configuration, the innermost complaint
the reason. Other text is joined into one line as it is. The package's version is bounded, because every release may
reword its errors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence

from jsonargparse import ArgumentParser

from lit_fed.command.refusals import suggest
from lit_fed.command.refusals.suggest import join_and, join_or
from lit_fed.command.table import COMMANDS, asked

# Patterns of a report's lines, by kind; the first that matches counts.
_PHRASES = (
    ("noise", r"Does not validate against|Errors:|Given value type|Expected a <class 'NoneType'>|Expected a path but"),
    ("noise", r"Subclass types expect|a class path \(str\)|a dict (?:with|without) |Given value: N\w+\("),
    ("key", r'Parser key "([^"]+)"'),
    ("class", r"Problem with given class_path '([^']+)'"),
    ("bases", r"Subtypes: (.*)"),
    ("given", r"Given value: (.*?)(?:\. Got value: .*)?$"),
    ("unknown", r"Option '([^']+)' is not accepted"),
    ("absent", r"the following arguments are required: (.+)"),
    ("no_class", r"Expected a dot import path string: (\S+)"),
    ("no_class", r"Import path (\S+) does not correspond to a subclass"),
    ("foreign", r"Import path does not correspond to a subclass"),
    ("abstract", r"Expected an instantiatable class, but"),
    ("no_import", r"module '[^']+' has no attribute '[^']+'|No module named '[^']+'"),
    ("no_mapping", r"Not a valid subclass"),
    ("wanted", r"Expected an? (.+)"),
    ("reason", r"(.*)"),
)
# Patterns of reports that are one line, and functions that answer them, given the command line.
_FLAT: tuple[tuple[str, Callable[[str, Sequence[str]], str]], ...] = (
    (r"unrecognized arguments: (.+)", lambda words, args: suggest.option(words.split(), *_asked_for(args))),
    (r"(?:Subcommand|Group) '.+' does not accept option '([^']+)'", lambda name, args: _no_key(name, args)),
    (r"Option '[^']+' is not accepted before subcommand '([^']+)'", lambda name, _: _too_early(name)),
    (r"Option '([^']+)' is not accepted$", lambda name, args: _no_key(name, args)),
    (r"argument (\S+): expected (?:one|at least one) argument", lambda option, args: _no_value(option, args)),
    (r"the following arguments are required: (.+)", lambda names, _: missing(names.split(", "))),
    (r"expected \"subcommand\" to be one of", lambda *_: _no_command()),
    (r"argument subcommand: invalid choice: '([^']*)'", lambda word, _: _wrong_command(word)),
)
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list", "str": "a text"}
_KINDS |= {"dict": "a mapping", "tuple": "a list"}


def explain(message: str, args: Sequence[str] = ()) -> str:
    """Reduce a parser's report to one line.

    Args:
        message: The report.
        args: The command line that it is about.
    """
    for pattern, answer in _FLAT:
        if match := re.match(pattern, message, re.DOTALL):
            return answer(match.group(match.lastindex or 0), args)
    if message.startswith(("Problems parsing config", "Unexpected config")):
        return " ".join(message.split())
    return _tell(_read(message))


def _read(message: str) -> dict[str, list[str]]:
    """Facts of a nested report by kind, outermost first."""
    facts: dict[str, list[str]] = defaultdict(list)
    for line in message.splitlines():
        text = line.strip().removeprefix("- ")
        if made_of := re.match(r"Type (.+?) expects a function or a callable class: (.*)", text):
            facts["bases"], text = [made_of.group(1)], made_of.group(2)
            if text.startswith(("Parser key", "Option", "the following")):
                facts["key"].append("init_args")
        text, *values = text.split(". Got value: ")
        facts["class"] += re.findall(r"^Namespace\(class_path='([^']+)'", values[-1] if values else "")
        value = "" if not values or values[0].startswith("Namespace(") else values[0]
        kind, found = next((kind, m.group(m.lastindex or 0)) for kind, p in _PHRASES if (m := re.match(p, text)))
        if kind == "class":
            facts["key"].append("init_args")
        elif kind == "key":
            facts["bases"] = []
        elif kind == "wanted" and value:
            facts["given"].append(value)
        elif kind == "no_import":
            named = value or facts["class"][-1]
            if (package := re.match(r"No module named '([^']+)'", text)) and not named.startswith(package.group(1)):
                kind, found = "reason", f"{named} cannot be imported: {found}"  # by the class's own module
            else:
                kind, found = "no_class", named
        if (found and found not in facts[kind]) or kind in ("key", "class"):
            facts[kind].append(found)
    return facts


def _tell(facts: dict[str, list[str]]) -> str:
    inner = ".".join(facts["key"])
    key = inner.removesuffix(".init_args")
    bases = suggest.classes_in(facts["bases"][-1] if facts["bases"] else "")
    given = facts["given"][0] if facts["given"] else None
    wanted = list(dict.fromkeys(_kind(kind) for kind in facts["wanted"]))
    if facts["unknown"] == ["class_path"]:
        return suggest.beside_class_path(key, given)
    if facts["unknown"]:
        return suggest.setting(f"{inner}.{facts['unknown'][0]}", facts["class"][-1])
    if facts["absent"]:
        absent = [f"{inner}.{name}" if inner else name for name in facts["absent"][0].split(", ")]
        return f"{join_and(absent)} missing; give it a value"
    if facts["abstract"] and given is not None and re.fullmatch(r"[A-Za-z_][\w.]*", given):
        return f"{key}: {given} is abstract; name a class that derives from it{suggest.choices(bases)}"
    if facts["foreign"] and given is not None:
        facts["no_class"].append(given)
    if facts["no_class"]:
        name = facts["no_class"][-1]
        if suggest.close_class(name, bases) or not wanted:
            return f"{key}: {suggest.no_class(name, bases)}"
    no_class = bool(facts["no_class"] or facts["no_mapping"] or facts["abstract"])
    if no_class and not wanted:
        return f"{key}: a class is needed; give class_path and init_args{suggest.choices(bases)}"
    if wanted:
        a_class = no_class and "a number" not in wanted  # where a number is wanted, the class would be Tensor
        hint = f"; write {key}+={given}" if given in [cls.__name__ for cls in suggest.subclasses(bases)] else ""
        told = "" if given is None else f", not {given}"
        return f"{key}: expected {join_or(wanted + ['a class'] * a_class)}{told}{hint}"
    return ": ".join(part for part in (key, " ".join(": ".join(facts["reason"]).split())) if part)


def _kind(kind: str) -> str:
    if literal := re.match(r"(?:typing\.)?Literal\[(.+)\]", kind):
        return join_or(literal.group(1).split(", "))
    name = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", kind)
    return _KINDS.get(name, name)


# ---------------------------------------------------------------------- commands


def missing(names: Sequence[str]) -> str:
    """Message about missing parts of a run, or missing options."""
    keys = suggest.in_order([name.partition(".")[2] or name for name in names])
    if not suggest.are_parts(keys):
        command = names[0].partition(".")[0]
        options = _own_options([command])
        shown = [f"--{key}" if key in options or not options else key.upper() for key in keys]
        return f"{join_and(shown)} missing; see lit-fed {command} --help"
    return f"{join_and(keys)} missing; name a class with --{keys[0]} or in a file given with --config"


def _no_key(name: str, args: Sequence[str]) -> str:
    return suggest.key(name, *_asked_for(args))


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


def _no_command() -> str:
    return f"no command given; choose {join_or(list(COMMANDS))}, as in: lit-fed fit --config my.yaml"


def _wrong_command(word: str) -> str:
    close = suggest.close(word, COMMANDS)
    return f"there is no command {word!r}; " + (f"did you mean {close}?" if close else f"choose {join_or([*COMMANDS])}")


def _too_early(command: str) -> str:
    return f"settings come after the command: lit-fed {command} --config my.yaml"
