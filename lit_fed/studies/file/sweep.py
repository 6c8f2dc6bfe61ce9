"""``grid`` in a study file: a row, or a column, for every combination of settings' values."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lit_fed.studies.file.where import Where

_LONGEST = 60  # maximum length of a value in a folder's name


def unrolled(content: Mapping[str, Any], where: Where) -> dict[str, Any]:
    """Expand every ``grid`` of a study file into rows and columns.

    The study's ``grid`` makes the columns from its last setting and the rows from the others; a single setting makes
    rows. In a study with rows, all settings make columns; in a study with columns, rows. A ``grid`` of a row or a
    column multiplies this row or column.

    Args:
        content: The file's content with the profile applied.
        where: The file.
    """
    unrolled_content = dict(content)
    grid = _checked(unrolled_content.pop("grid", None), where.at("grid"))
    for part in ("rows", "columns"):
        if isinstance(unrolled_content.get(part), dict):
            unrolled_content[part] = dict(_several(unrolled_content[part], where.at(part)))
    if not grid:
        return unrolled_content
    keys, has_rows, has_columns = list(grid), bool(unrolled_content.get("rows")), bool(unrolled_content.get("columns"))
    if has_rows and has_columns:
        raise where.at("grid").error(
            "the study already has rows and columns; move grid into a row or a column to multiply it"
        )
    if has_rows or has_columns:
        parts = {"columns" if has_rows else "rows": keys}
    else:
        parts = {"rows": keys[:-1], "columns": keys[-1:]} if len(keys) > 1 else {"rows": keys}
    for part, chosen in sorted(parts.items()):  # columns first, for the axis of a picture
        unrolled_content[part] = dict(_combinations({key: grid[key] for key in chosen}, {}, where.at("grid")))
        if all("x" in variant for variant in unrolled_content[part].values()):
            unrolled_content.setdefault("x_label", _short(chosen)[chosen[0]])
    return unrolled_content


def _several(variants: Mapping[Any, Any], where: Where) -> Iterator[tuple[Any, Any]]:
    """Yield rows or columns, with every ``grid`` expanded."""
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
        raise where.refusal(grid, "a mapping from settings to lists of values")
    kept = {key: values for key, values in grid.items() if values is not None}  # a profile may leave one out
    for key, values in kept.items():
        if not isinstance(key, str):
            raise where.error(f"{key!r} is not a setting; write it as on the command line, such as trainer.max_rounds")
        if not isinstance(values, list) or not values:
            raise where.at(key).refusal(values, "a list of values")
        texts = [_text(value) for value in values]
        if twice := next((text for text in texts if texts.count(text) > 1), None):
            raise where.at(key).error(f"{twice} occurs twice; remove one")
    return kept


def _combinations(
    grid: Mapping[str, list[Any]], rest: Mapping[str, Any], where: Where, name: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row, or a column, for every combination of values, named after the values.

    Args:
        grid: Values by setting.
        rest: The other keys of the row or column.
        where: Its place, for errors.
        name: Its name without the values.
    """
    fixed = where.mapping(rest, "set")
    if both := [key for key in grid if key in fixed]:
        raise where.error(f"{both[0]} is in set and in grid; remove one")
    short, label = _short(list(grid)), where.text(rest, "label", name)
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        parts = [f"{short[key]}={_slug(_text(value))}" for key, value in chosen.items()]
        words = [f"{short[key]} = {_text(value)}" for key, value in chosen.items()]
        variant: dict[str, Any] = {
            **rest,
            "set": {**fixed, **chosen},
            "label": ", ".join([label] * bool(label) + words),
        }
        if len(values) == 1 and isinstance(values[0], int | float) and not isinstance(values[0], bool):
            variant.setdefault("x", values[0])
        yield "_".join([name] * bool(name) + parts), variant


def _short(keys: list[str]) -> dict[str, str]:
    """Shorten settings to their last word, unless two share it."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def _text(value: Any) -> str:
    """Format a value as on the command line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _slug(text: str) -> str:
    """Convert a value to a part of a name, which is one word and a folder."""
    words = re.sub(r"[^\w.+=-]+", "_", text).strip("_.")
    if words == text and len(text) <= _LONGEST:
        return text
    return f"{words[:_LONGEST]}_{hashlib.sha256(text.encode()).hexdigest()[:4]}".lstrip("_")
