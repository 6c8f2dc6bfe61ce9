"""JSON schema of configuration files, by which editors check and complete them.

It is made here and shipped: that takes a minute, and private names of jsonargparse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, get_args

from jsonargparse._common import parser_context
from jsonargparse._completions_jsonschema import ParserJsonschema, new_object, schema_uri
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lit_fed.command.commands import cost
from lit_fed.command.reading.parts import add_parts
from lit_fed.command.reading.settings import CLASSES
from lit_fed.command.refusals.suggest import subclasses
from lit_fed.command.roots import import_named
from lit_fed.parsing import Parser
from lit_fed.studies.file.study import PROFILE_KEYS, STUDY_KEYS, VARIANT_KEYS
from lit_fed.studies.simulations import run_simulation


def schema() -> dict[str, Any]:
    """JSON schema of runs and parts of runs, studies, simulations and tables of costs, from the parsers that read them.

    Note:
        Nothing is required, because a file may hold a part of a run. A class of another package is accepted by its
        import path, and its settings are not checked; nor are unknown ones where another file names the class.
    """
    import_named()
    made = _Schema()  # type: ignore[no-untyped-call]  # jsonargparse is typed in parts only
    run = made.of(add_parts)
    for key, kind in {
        "cost": made.of(cost.add_arguments),
        "simulate": made.of(run_simulation.add_arguments),
        "profiles": _study(),
        "rows": _study(),
    }.items():  # a key that only files of this kind have
        run = {"if": {"required": [key]}, "then": kind, "else": run}
    return {"$schema": schema_uri, "type": "object", **_plain(run), "$defs": _plain(made.reachable_defs(run))}


def _plain(part: Any) -> Any:
    """A part of the schema for people: null last, of which an error would speak first, and short descriptions."""
    if isinstance(part, list):
        return [_plain(item) for item in part]
    if not isinstance(part, dict):
        return part
    plain = {key: _plain(value) for key, value in part.items() if key != "$schema"}  # which each class would have
    if isinstance(part.get("anyOf"), list):
        plain["anyOf"].sort(key=lambda kind: kind.get("type") == "null")
    if isinstance(part.get("description"), str):
        plain["description"] = part["description"].partition("\n\n")[0]
    return plain


def _study() -> dict[str, Any]:
    variants = _by_name(_only(VARIANT_KEYS))
    profiles = _by_name(_only(PROFILE_KEYS, rows=variants, columns=variants))
    return _only(STUDY_KEYS, rows=variants, columns=variants, profiles=profiles)


def _only(keys: Iterable[str], **parts: Any) -> dict[str, Any]:
    return {"properties": {**dict.fromkeys(sorted(keys), True), **parts}, "additionalProperties": False}


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
        known = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in _named(class_type)}
        names = sorted({cls.__name__ for cls in known.values()})
        name = {"type": "string", "anyOf": [{"enum": names}, {"pattern": r"[./]"}]}
        branches, flat = [], dict[str, list[Any]]()
        for path, cls in sorted(known.items()):
            settings = self._settings(path, cls, action)
            root = cls.__module__.partition(".")[0]
            is_named = {"pattern": rf"^({root}\.(\w+\.)*)?{cls.__name__}$"}  # also by a public path
            asked = {"properties": {"class_path": is_named}, "required": ["class_path"]}
            branches.append({"if": asked, "then": {"properties": {"init_args": settings}}})
            for key, value in self.defs[path].get("properties", {}).items():
                kind = {name: part for name, part in value.items() if name not in ("description", "default")}
                flat.setdefault(key, [])
                flat[key] += [kind] * (kind not in flat[key])
        inner = {"type": "object"}
        whole = new_object()
        whole["properties"] |= {"class_path": name, "init_args": inner, "dict_kwargs": inner}
        whole |= {"allOf": branches} if branches else {}  # an empty list is not a schema
        if class_type in _BY_SETTINGS:  # settings alone: the class is named in another file, or it is the default
            settings = {key: kinds[0] if len(kinds) == 1 else {"anyOf": kinds} for key, kinds in flat.items()}
            is_whole = {"anyOf": [{"required": [key]} for key in whole["properties"]]}
            whole = {"if": is_whole, "then": whole, "else": {"type": ["object", "null"], "properties": settings}}
        return {"if": {"type": "string"}, "then": name, "else": whole}

    def _settings(self, path: str, cls: type, action: Any) -> dict[str, Any]:
        """Settings of a class, which are defined once for all classes that it derives from."""
        if path not in self.defs:
            self.defs[path] = {}  # a class may hold another of its own kind
            self.defs[path] |= self.class_parser_schema(path, action)
            for name in ("params", "optimizer") if issubclass(cls, Optimizer | LRScheduler) else ():
                self.defs[path].get("properties", {}).pop(name, None)  # the run gives it
        return {"$ref": f"#/$defs/{path}"}


_BY_SETTINGS = {base for bases in CLASSES.values() for base in bases}
"""Bases of the classes whose settings may stand without the class's name."""

_NETWORKS = ("lit_fed.", "torch.nn.modules.", "torchvision.transforms.")


def _named(base: type) -> list[type]:
    """Classes that a configuration may name: most of a thousand modules of torch and torchvision are inner ones."""
    known = [cls for cls in subclasses([base]) if "._" not in cls.__module__]
    return [cls for cls in known if cls.__module__.startswith(_NETWORKS)] if base is Module else known
