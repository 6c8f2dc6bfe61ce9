"""``lit-fed schema``: a JSON schema of configuration files, by which editors check and complete them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, get_args

from jsonargparse import ArgumentParser
from jsonargparse._common import parser_context
from jsonargparse._completions_jsonschema import ParserJsonschema, new_object, schema_uri
from typing_extensions import override

from lit_fed.command.command import Call
from lit_fed.command.commands import cost
from lit_fed.command.reading.parts import add_parts
from lit_fed.command.refusals.suggest import subclasses
from lit_fed.parsing import Parser
from lit_fed.studies.file.study import PROFILE_KEYS, STUDY_KEYS, VARIANT_KEYS
from lit_fed.studies.simulations import run_simulation


def add_arguments(parser: ArgumentParser) -> None:
    """Add no options."""


def run(call: Call) -> int:
    """Print the schema."""
    print(json.dumps(schema(), indent=1))
    return 0


def schema() -> dict[str, Any]:
    """JSON schema of runs and parts of runs, studies, simulations and tables of costs, from the parsers that read them.

    Note:
        Nothing is required, because a file may hold a part of a run. A class of another package is accepted by its
        import path, and its settings are not checked.
    """
    made = _Schema()  # type: ignore[no-untyped-call]  # jsonargparse is typed in parts only
    run = made.of(add_parts)
    for key, kind in {
        "cost": made.of(cost.add_arguments),
        "simulate": made.of(run_simulation.add_arguments),
        "profiles": _study(),
        "rows": _study(),
    }.items():  # a key that only files of this kind have
        run = {"if": {"required": [key]}, "then": kind, "else": run}
    return {"$schema": schema_uri, "type": "object", **run, "$defs": made.defs}


def _study() -> dict[str, Any]:
    variants = _by_name(_only(VARIANT_KEYS))
    profiles = _by_name(_only(PROFILE_KEYS, rows=variants, columns=variants))
    return _only(STUDY_KEYS, rows=variants, columns=variants, profiles=profiles)


def _only(keys: Iterable[str], **parts: Any) -> dict[str, Any]:
    return {"properties": {**dict.fromkeys(keys, True), **parts}, "additionalProperties": False}


def _by_name(part: Any) -> dict[str, Any]:
    return {"additionalProperties": part}  # a null, which drops a row, has no properties to check


class _Schema(ParserJsonschema):
    """Schema in which a class has a short name too, and only the settings of the class that is named are checked."""

    def of(self, add: Callable[[Parser], None]) -> dict[str, Any]:
        """Schema of the files that a parser reads."""
        parser, found = Parser(), new_object()
        add(parser)
        with parser_context(parent_parser=parser):
            self.add_properties(parser, found)
        return found

    @override
    def set_dest(self, schema: Any, dest: str, dest_schema: Any, required: bool, descriptions: Any) -> None:
        super().set_dest(schema, dest, dest_schema, False, descriptions)

    @override
    def callable_schema(self, typehint: Any, action: Any) -> dict[str, Any]:
        """Accept what a callable returns, such as an optimizer or one of two kinds of schedule, by class."""
        returned = get_args(typehint)[-1:] if get_args(typehint) else ()
        kinds = [one for kind in returned for one in get_args(kind) or [kind] if isinstance(one, type)]
        classes = [kind for kind in kinds if kind.__module__ != "builtins"]
        return {"anyOf": [{"type": "string"}, self.class_ref(classes[0], action, True)]} if classes else {}

    @override
    def subclass_def(self, class_type: type, action: Any) -> dict[str, Any]:
        """Check settings behind the class's name: of many alternatives, an error would name none."""
        known = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in subclasses([class_type])}
        names = sorted({cls.__name__ for cls in known.values()})
        name = {"type": "string", "anyOf": [{"enum": names}, {"pattern": r"[./]"}]}
        branches = []
        for path, cls in known.items():
            settings = {"properties": {"init_args": self.class_parser_schema(path, action)}}
            root = cls.__module__.partition(".")[0]
            is_named = {"pattern": rf"^({root}\.(\w+\.)*)?{cls.__name__}$"}  # also by a public path
            asked = {"type": "object", "properties": {"class_path": is_named}, "required": ["class_path"]}
            branches.append({"if": asked, "then": settings})
        whole = new_object()
        inner = {"type": "object"}
        whole["properties"] |= {"class_path": name, "init_args": inner, "dict_kwargs": inner}
        return {"if": {"type": "string"}, "then": name, "else": {**whole, "allOf": branches}}
