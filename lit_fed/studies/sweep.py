"""What ``grid`` in a study file stands for: a row, or a column, for every combination of values of some settings."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lit_fed.studies.where import Where

_LONGEST = 60  # of a value in a name, which becomes a folder


def unrolled(content: Mapping[str, Any], where: Where) -> dict[str, Any]:
    """A study file's content with rows and columns in the place of every ``grid``.

    Of the study's own ``grid`` the last setting makes the columns and those before it the rows, a lone one the rows;
    where the study has rows, all settings make columns, where it has columns, rows. A ``grid`` of a row, or a column,
    makes several of it.

    Args:
        content: The file's content, its profile applied.
        where: The file.

    Raises:
        ConfigError: If a ``grid`` is no mapping from settings to lists of different values.
    """
    found = dict(content)
    grid = _checked(found.pop("grid", None), where.at("grid"))
    for part in ("rows", "columns"):
        if isinstance(found.get(part), dict):
            found[part] = dict(_several(found[part], where.at(part)))
    if not grid:
        return found
    keys, has_rows, has_columns = list(grid), bool(found.get("rows")), bool(found.get("columns"))
    if has_rows and has_columns:
        raise where.at("grid").error(
            "there are rows and columns already; write it into a row or a column to make several"
        )
    if has_rows or has_columns:
        parts = {"columns" if has_rows else "rows": keys}
    else:
        parts = {"rows": keys[:-1], "columns": keys[-1:]} if len(keys) > 1 else {"rows": keys}
    for part, chosen in sorted(parts.items()):  # columns first: what is beside the lines of a picture
        found[part] = dict(_combinations({key: grid[key] for key in chosen}, {}, where.at("grid")))
        if all("x" in variant for variant in found[part].values()):
            found.setdefault("x_label", _short(chosen)[chosen[0]])
    return found


def _several(variants: Mapping[Any, Any], where: Where) -> Iterator[tuple[Any, Any]]:
    """Rows or columns, those with a ``grid`` in all of its combinations."""
    for name, settings in variants.items():
        if not isinstance(settings, dict) or "grid" not in settings:
            yield name, settings
            continue
        here = where.at(str(name))
        grid = _checked(settings["grid"], here.at("grid"))
        yield from _combinations(grid, {k: v for k, v in settings.items() if k != "grid"}, here, str(name))


def _checked(grid: Any, where: Where) -> dict[str, list[Any]]:
    if grid is None:
        return {}
    if not isinstance(grid, dict) or not grid:
        raise where.error(f"expected a mapping from settings to lists of values, not {grid!r}")
    kept = {key: values for key, values in grid.items() if values is not None}  # a profile may leave one out
    for key, values in kept.items():
        if not isinstance(key, str):
            raise where.error(f"{key!r} is no setting; write it as on the command line, such as trainer.max_rounds")
        if not isinstance(values, list) or not values:
            raise where.at(key).error(f"expected a list of values, not {values!r}")
        texts = [_text(value) for value in values]
        if twice := next((text for text in texts if texts.count(text) > 1), None):
            raise where.at(key).error(f"{twice} is there twice; remove one")
    return kept


def _combinations(
    grid: Mapping[str, list[Any]], rest: Mapping[str, Any], where: Where, name: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row, or a column, for every combination of values, called by them.

    Args:
        grid: Values by setting.
        rest: What else the row or column has.
        where: Its place.
        name: What it is called without the values.
    """
    own = where.mapping(rest, "set")
    if both := [key for key in grid if key in own]:
        raise where.error(f"{both[0]} is in set and in grid; remove one")
    short, label = _short(list(grid)), where.text(rest, "label", name)
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        parts = [f"{short[key]}={_slug(_text(value))}" for key, value in chosen.items()]
        words = [f"{short[key]} = {_text(value)}" for key, value in chosen.items()]
        variant: dict[str, Any] = {**rest, "set": {**own, **chosen}, "label": ", ".join([label] * bool(label) + words)}
        if len(values) == 1 and isinstance(values[0], int | float) and not isinstance(values[0], bool):
            variant.setdefault("x", values[0])
        yield "_".join([name] * bool(name) + parts), variant


def _short(keys: list[str]) -> dict[str, str]:
    """Settings by their last word, or in full where two end in the same."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def _text(value: Any) -> str:
    """A value as a reader of the table sees it: as the command line has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _slug(text: str) -> str:
    """A value as a part of a name, which is a word and becomes a folder."""
    words = re.sub(r"[^\w.+=-]+", "_", text).strip("_.")
    if words == text and len(text) <= _LONGEST:
        return text
    return f"{words[:_LONGEST]}_{hashlib.sha256(text.encode()).hexdigest()[:4]}".lstrip("_")
