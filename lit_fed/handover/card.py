"""The model card: what a network is, in Markdown, in which what others have named stays a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_fed.callbacks.progress import PROTOCOLS
from lit_fed.handover.facts import Facts


def card(facts: Facts, uses: Sequence[str], example: tuple[tuple[int, ...], str]) -> str:
    """The card.

    Args:
        facts: What is known.
        uses: How the files are used, in Python, one each.
        example: Shape and type of an input.
    """
    lines = ["---", "tags: [federated-learning, lit_fed]", "library_name: pytorch", "---", ""]
    lines += [f"# {_escaped(facts.task)} by {_escaped(facts.method)} on {_escaped(facts.data[0])}", ""]
    lines += ["A network trained by federated learning. These files need no lit_fed.", ""]
    lines += ["## Use", "", *(line for use in uses for line in ("```python", use, "```", ""))]
    lines += ["## Inputs and outputs", "", *_inputs(facts, *example), ""]
    lines += ["## Data", "", *_table({"data": facts.data[0], **facts.clients, **facts.data[1]})]
    lines += [f"| partition, SHA-256 | {_code(facts.partition_sha256)} |", ""]
    lines += ["## Training", "", *_table({"method": facts.method, "trained for": _rounds(facts), **facts.algorithm})]
    lines += [*list(_table(facts.training))[2:], ""]
    for name, kept in facts.around.items():
        lines += [f"## {_escaped(name.capitalize())}", "", *_table(kept), ""]
    lines += ["## Results", "", *_results(facts), ""]
    lines += ["## Written with", "", *_table(facts.versions), ""]
    lines += ["## To be written by whoever hands it on", ""]
    lines += ["What it may be used for and what not, whose data these were and on what terms, and the licence.", ""]
    return "\n".join(lines)


def _inputs(facts: Facts, shape: tuple[int, ...], dtype: str) -> Iterator[str]:
    sizes = ", ".join(["B", *map(str, shape)])
    yield f"- An input is a batch ({sizes}) of `{dtype}`, B of any size, as the data set stores it."
    if facts.preprocessing is None:
        yield "- How the data module prepares its inputs is code of its own, which these files do not hold: an input is"
        yield "  what comes out of that."
    elif facts.preprocessing:
        yield f"- The network begins with its preprocessing: {_code(json.dumps(facts.preprocessing))}."
    if facts.class_names is not None:
        yield f"- Outputs, in their order: {', '.join(_escaped(name) for name in facts.class_names)}."


def _results(facts: Facts) -> Iterator[str]:
    if not facts.metrics:
        yield "Nothing was evaluated in the round that this is of."
        return
    yield f"After {_rounds(facts)}, on {facts.evaluated_on} data:"
    yield ""
    yield "| metric | value | of |"
    yield "|---|---|---|"
    for name, value in facts.metrics.items():
        of = PROTOCOLS[name.partition("/")[0]].format(data=facts.evaluated_on)
        yield f"| {_code(name)} | {value:.6g} | {of} |"


def _rounds(facts: Facts) -> str:
    return f"{facts.rounds} round{'' if facts.rounds == 1 else 's'}"


def _table(entries: Mapping[str, Any]) -> Iterator[str]:
    yield "| | |"
    yield "|---|---|"
    for key, value in entries.items():
        if value is not None:
            told = (
                _escaped(value) if isinstance(value, str) else _code(json.dumps(value, ensure_ascii=False, default=str))
            )
            yield f"| {_escaped(key)} | {told} |"


_MARKS = re.compile(r"[\\`*\[\]|~$!]|^[#+\-=]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "://": "&#58;//", "www.": "www&#46;"}  # links, too


def _escaped(text: str) -> str:
    """A text that stays one: no Markdown, no HTML, no link, and in its line and cell."""
    marked = _MARKS.sub(lambda found: f"\\{found[0]}", _line(text))
    return re.sub("|".join(map(re.escape, _HTML)), lambda found: _HTML[found[0].lower()], marked, flags=re.I)


def _code(text: str) -> str:
    """A text as code, in which nothing has a meaning but the mark at its end, and a bar in a table."""
    line = _line(text).replace("|", "\\|")
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    return f"{fence}{line}{fence}" if len(fence) == 1 else f"{fence} {line} {fence}"


def _line(text: str) -> str:
    """A text in one line, without what is not to be seen."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())
