"""A site's approval of what a configuration makes its node do, asked before anything that it names is imported."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import file_digest, sha256
from importlib.machinery import PathFinder, all_suffixes
from importlib.util import find_spec
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from lit_fed.command.reading.config_files import ConfigFiles, FilePart, read_settings
from lit_fed.command.reading.settings import place_of
from lit_fed.command.reading.words import spelled
from lit_fed.command.refusals.explain import explain_words
from lit_fed.command.refusals.suggest import imported, parameters_of, subclasses
from lit_fed.command.roots import import_named
from lit_fed.engine.storage.files import write_text
from lit_fed.errors import ConfigError
from lit_fed.federation.ends import keep_private
from lit_fed.federation.messages.wire import shown
from lit_fed.protocols import DEFAULT_PROTOCOLS, Protocol
from lit_fed.trainer import FederatedTrainer
from lit_fed.yaml_text import read_document

TRUSTED = ("lit_fed", "torch.nn", "torch.optim")
"""Prefixes of trusted classes. The rest of torch also has classes and functions that run programs or download code."""

FOLDER = "approved"
"""The folder of approvals, beside the node's key or in its ``--state_dir``."""


class NotApproved(ConfigError):
    """A configuration that the site has not approved."""


_PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")
_RENEWED = ("--key", "--certificate", "--status_token")  # files that may change without another approval
_imported = dict[str, Any]()  # hashes of other code by its package, as this process imported it
_MOST = 8  # differences in one line


class Plan:
    """The effects of a configuration and of a node's own options, found without importing what they name.

    Args:
        parts: The settings in the order in which they are merged.
        options: The node's own options.
        trust: Prefixes of import paths that the site adds to `TRUSTED`.

    Attributes:
        settings: The settings by dotted key, the options, the version, and the hashes of files and of other code.
        trusted: Import paths of trusted classes, each with a setting that names it.
        other: All other import paths, each with a setting that names it.
        hash: SHA-256 of the settings, and of the order in which files and options give them.

    Note:
        Whatever a part names is listed, also where a later part replaces it.
    """

    def __init__(self, parts: Sequence[FilePart], options: Mapping[str, Any], trust: Sequence[str] = ()) -> None:
        from lit_fed import __version__

        self.settings: dict[str, Any] = {"lit_fed": __version__}
        self.trusted, self.other = dict[str, str](), dict[str, str]()
        import_named()
        classes = sorted(subclasses([object]), key=lambda cls: str(cls.__module__).startswith(TRUSTED))
        short = {cls.__name__: f"{cls.__module__}.{cls.__qualname__}" for cls in classes}
        for part in parts:
            place = ".".join(place_of(part.keys))
            for key, value in _leaves(part.value, place):
                if value is None:  # in place of a class with its settings, too
                    self.settings = {name: one for name, one in self.settings.items() if not name.startswith(f"{key}.")}
                self.settings[key] = value
            for key, text in _texts(part.value, place):
                for path in _import_paths(key, text, short):
                    (self.trusted if _is_trusted(path, (*TRUSTED, *trust)) else self.other).setdefault(path, key)
        self.settings |= {f"--{key}": value for key, value in options.items()}
        for key, value in [*self.settings.items()]:
            if isinstance(value, str) and os.path.isfile(value) and not key.startswith(("data.", *_RENEWED)):
                self.settings[f"content of {key}"] = _hash([Path(value)])
        for name in sorted({path.partition(".")[0] for path in (*self.other, *self.trusted)} - {"lit_fed", "torch"}):
            self.settings[f"code of {name}"] = _hash(_files(name) or ())
        whole = [(part.keys, bool(part.origins), part.value) for part in parts], self.settings
        self.hash = sha256(repr(whole).encode()).hexdigest()

    def differences(self, before: Mapping[str, Any]) -> list[str]:
        """Every setting that differs from settings before, as ``key: old → new``."""
        told = {key: (_value(before, key), _value(self.settings, key)) for key in {**before, **self.settings}}
        lines = [f"{shown(key)}: {old} → {new}" for key, (old, new) in told.items() if old != new]
        return lines or ["the order in which files and options give the settings"]

    def lines(self) -> Iterator[str]:
        """Yield a description of the node's work here, line by line."""
        of, secure = self._below, self._below("trainer.secure_sum")
        least = f"in sums over at least {of('--report_least')}" * (of("--report") == "aggregate")
        classes = " and of each class" * (of("--histogram") == "True")
        update = "in a masked sum over nodes" if secure else "of each client"
        asked = of("--statistics")
        usual = ", ".join(one.__name__ for one in DEFAULT_PROTOCOLS if one.answer is not Protocol.answer)
        paths = {key: value for key, value in self.settings.items() if key[0] != "-" and os.sep in str(value)}
        rows = {
            "imports": ", ".join(map(shown, self.trusted)),
            "other code": ", ".join(f"{shown(path)} ({shown(key)})" for path, key in self.other.items()),
            "data": f"{of('data')}; clients {of('--client') or of('--client_position')}",
            "other paths": ", ".join(f"{shown(key)} {shown(path)}" for key, path in paths.items()),
            "method": of("algorithm"),
            "rounds": of("trainer.max_rounds") or parameters_of(FederatedTrainer)["max_rounds"].default,
            "server": of("--server"),
            "at first": f"of each client the number of its samples{classes}, and a hash of its data",
            "each round": f"the update {update}; of errors the type and the place",
            "metrics": f"{least or 'of each client'}: training, {of('trainer.protocols') or usual}",
            "privacy": of("trainer.privacy"),
            "secure sum": secure and f"{secure}; at least {of('--smallest_sum') or 'threshold'} nodes",
            "statistics": asked and f"alone, and nothing of the above: no count below {asked}",
            "hash": self.hash,
        }
        yield "With this configuration the node does the following, with all rights of its user:"
        yield from (f"  {name:<12}{row or 'none'}" for name, row in rows.items())

    def _below(self, place: str) -> str:
        """The settings at and below a place, in one text."""
        found = {key: key[len(place) :] for key in self.settings if f"{key}.".startswith(f"{place}.")}
        names = {key: re.sub(r"\.(class_path|\d+)(?=\.|$)", "", name) for key, name in found.items()}
        texts = []
        for name, keys in groupby(names, names.__getitem__):  # the items of a list have one name
            given = [self.settings[key] for key in keys]
            flat = chain.from_iterable(value if isinstance(value, list) else [value] for value in given)
            values = [shown(value) for value in flat if value is not None]
            text = f"[{', '.join(values)}]" if name and values[1:] else ", ".join(values)
            texts += [f"{shown(name[1:])} {text}".strip()] * bool(values)
        return ", ".join(texts)


def admit(words: Sequence[str], files: ConfigFiles, parser: ArgumentParser, own: Mapping[str, Any]) -> None:
    """Refuse the configuration of a command line if the site has not approved it.

    Args:
        words: The command line, from the command on.
        files: Its files; they are read once, so that what is approved is what is started.
        parser: The command's parser.
        own: Defaults of the command's own options.
    """
    given = [*spelled(words[1:])]
    rest = [option for option, value in given if value is None and option.partition("=")[0] != "--print_config"]
    try:
        options = {**own, **parser.parse_args(rest, defaults=False).as_dict()}
    except ArgumentError as error:
        raise ConfigError(explain_words(error, parser, rest, words[0])) from error
    own_words = ("approve", "approved", "trust", "standing", "proxy")  # a proxy's URL may have a password
    ask, approved, trust, standing, _ = (options.pop(name, None) for name in own_words)
    if standing is not None and "--config" not in dict(given):
        if ask:
            raise ConfigError("--approve asks about a configuration; name one with --config")
        return  # each configuration is admitted when a server names it
    folder = _folder(options["state_dir"], options["key"])
    if ask or approved is not None or trust is not None or standing is not None or folder.exists():
        settings = [(option, value) for option, value in given if value is not None]
        read = [files.parts(value) if name == "--config" else [files.option(name, value)] for name, value in settings]
        trusted = [name for name in (trust or "").split(",") if name]
        if any(map(_is_here, trusted)):  # to find out whether it defines a class is to import it
            _import_from_here(options["state_dir"])
        plan = Plan([*chain(*read)], options, trusted)
        check(plan, folder, bool(ask), approved, always=standing is not None)
        if plan.other:
            _import_from_here(options["state_dir"])
        _check_imported(plan)
    else:
        _import_from_here()


def _check_imported(plan: Plan) -> None:
    """Refuse code that has changed since this process imported it, for a node that stands would go on with the old."""
    for key, code in plan.settings.items():
        name = key.removeprefix("code of ")
        if name != key:
            if name in sys.modules and _imported.get(name, code) != code:
                raise ConfigError(f"the {key} has changed since this process imported it; restart the node")
            _imported[name] = code


def _is_here(name: str) -> bool:
    return PathFinder.find_spec(name.partition(".")[0], [os.getcwd()]) is not None


def _import_from_here(state_dir: str | None = None) -> None:
    """Let modules in the working directory be imported; with a folder, without compiled files that lie beside them."""
    if state_dir is not None:  # for data workers, too
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = os.path.abspath(Path(state_dir) / "pycache")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def kept(state_dir: str, key: str | None, approved: str | None = None) -> list[str]:
    """The hashes of the configurations that a node's site approves, for its log."""
    found = {path.stem for path in _folder(state_dir, key).glob("*.json")}
    return sorted(found if approved is None else found | {approved})


def _folder(state_dir: str, key: str | None) -> Path:
    return (Path(state_dir) if key is None else Path(key).parent) / FOLDER


def check(plan: Plan, folder: Path, ask: bool = False, approved: str | None = None, always: bool = False) -> None:
    """Refuse a plan that the site has not approved.

    Args:
        plan: The plan.
        folder: The approvals, a file for each, named by its hash. While it exists, every plan needs an approval;
            without it, a plan with trusted imports alone needs none.
        ask: Print the plan, ask for an approval, and keep it.
        approved: The hash of the approved plan, in place of the approvals in the folder.
        always: Enforce approvals without a folder, too.
    """
    if approved is not None and approved != plan.hash:
        raise NotApproved(f"--approved is {shown(approved, 64)}, and the hash is {plan.hash}; read it with --approve")
    kept = sorted(folder.glob("*.json"), key=os.path.getmtime)
    if approved is not None or plan.hash in [path.stem for path in kept]:
        return
    changed = plan.differences(read_settings(kept[-1], "approval")["settings"]) if kept else []
    if ask:
        _ask(plan, changed)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep_private()
        content = json.dumps({"words": [*plan.lines()], "settings": plan.settings}, indent=1, ensure_ascii=False)
        write_text([content], folder / f"{plan.hash}.json")
    elif always or folder.exists():
        more = f"; and {len(changed) - _MOST} more" * (len(changed) > _MOST)
        why = f"changed {'; '.join(changed[:_MOST])}{more}" if kept else f"{folder} holds no approval"
        raise NotApproved(f"this node has not approved this configuration: {why}; read it, and run with --approve")
    elif plan.other:
        path, key = next(iter(plan.other.items()))
        raise ConfigError(f"{shown(key)} is {shown(path)}, which is not among the trusted imports; run with --approve")


def _ask(plan: Plan, changed: Sequence[str]) -> None:
    print("\n".join([*plan.lines(), *(f"  {'changed':<12}{line}" for line in changed)]), flush=True)
    if not sys.stdin.isatty():
        raise ConfigError("--approve asks, and standard input is not a terminal; use one, or give --approved HASH")
    answer = ""
    with suppress(EOFError):
        answer = input("Approve? [y/n] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise ConfigError("the configuration is not approved; nothing of it was imported or started")


# ---------------------------------------------------------------------- settings


def _value(settings: Mapping[str, Any], key: str) -> str:
    return shown(json.dumps(settings[key])) if key in settings else "not set"


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Single values with their dotted keys, without ``init_args``."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not inner or not value:
        yield key, value
    for name, one in inner:
        yield from _leaves(one, key if name == "init_args" else f"{key}.{name}")


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Texts with their dotted keys, and the texts in a text that is YAML, as the parser reads it."""
    for place, leaf in _leaves(value, key):
        if isinstance(leaf, str):
            yield place, leaf
            with suppress(yaml.YAMLError, ValueError):
                if (inside := read_document(leaf).content) != leaf:
                    yield from _texts(inside, place)


# ---------------------------------------------------------------------- imports


def _import_paths(key: str, text: str, short: Mapping[str, str]) -> set[str]:
    """Import paths that a text may be, or may hold: of modules that exist, and of classes by their short names."""
    found = {path for path in _PATH.findall(text) if _files(path.partition(".")[0]) is not None}
    if key.endswith("class_path") or (text in short and text[0].isupper()):
        found.add(short.get(text, text))
    return found


def _is_trusted(path: str, trusted: Sequence[str]) -> bool:
    """Whether a trusted module defines a class at a path, which may lead to its imports too, as to ``os.system``."""
    prefixes = tuple(f"{prefix}." for prefix in trusted)
    made = imported(path) if path.startswith(prefixes) else None
    return isinstance(made, type) and f"{made.__module__}.".startswith(prefixes)


def _files(name: str) -> list[Path] | None:
    """The files of a top-level module or package that Python runs, without an import; None if it does not exist."""
    try:
        spec = find_spec(name) or PathFinder.find_spec(name, [os.getcwd()])
    except (ImportError, ValueError):  # ValueError: a module that is loaded and has no file, such as the main program
        return []
    if spec is None or spec.submodule_search_locations is None:
        return None if spec is None else [Path(str(spec.origin))] * spec.has_location
    folders = map(Path, spec.submodule_search_locations)
    files = [path for folder in folders for path in folder.rglob("*") if path.name.endswith(tuple(all_suffixes()))]
    return sorted(path for path in files if path.parent.name != "__pycache__") or None


def _hash(files: Iterable[Path]) -> str:
    digest = sha256()
    for path in files:
        with open(path, "rb") as file:
            digest.update(file_digest(file, "sha256").digest())
    return digest.hexdigest()
