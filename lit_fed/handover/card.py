"""The model card in Markdown; names from a checkpoint are escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lit_fed.callbacks.progress import meaning_of
from lit_fed.handover.facts import Facts
from lit_fed.printing import counted


class Inputs(NamedTuple):
    """The inputs of an exported network.

    Args:
        shape: Shape of one input, without the batch.
        dtype: Its type.
        free: By axis, counted from the batch, the least and the largest size that the program takes.
        joints: Names of the joints, if the outputs are joints.
        cell: Pixels to whose multiples height and width of pictures are padded.
    """

    shape: tuple[int, ...]
    dtype: str
    free: Mapping[int, tuple[int, int | None]]
    joints: Sequence[str] = ()
    cell: int = 1


def card(facts: Facts, uses: Sequence[str], inputs: Inputs) -> str:
    """The text of a model card.

    Args:
        facts: The facts about the network.
        uses: A Python example for each file.
        inputs: The inputs that the files take.
    """
    lines = ["---", "tags: [federated-learning, lit_fed]", "library_name: pytorch", "---", ""]
    lines += [f"# {_escaped(facts.task)} by {_escaped(facts.method)} on {_escaped(facts.data[0])}", ""]
    lines += ["A network trained by federated learning. These files need no lit_fed.", ""]
    lines += ["## Use", "", *(line for use in uses for line in ("```python", use, "```", ""))]
    lines += ["## Inputs and outputs", "", *_inputs(facts, inputs)]
    lines += [*(_outputs(facts, inputs) if inputs.joints else ()), ""]
    lines += ["## Data", "", *_table({"data": facts.data[0], **facts.clients, **facts.data[1]})]
    lines += [f"| partition, SHA-256 | {_code(facts.partition_sha256)} |"] if facts.partition_sha256 else []
    lines += [""]
    training = {"method": facts.method, "trained for": counted(facts.rounds, "round"), **facts.algorithm}
    lines += ["## Training", "", *_table(training)]
    lines += [*list(_table(facts.training))[2:], ""]
    for name, kept in facts.around.items():
        lines += [f"## {_escaped(name.capitalize())}", "", *_table(kept), ""]
    lines += ["## Results", "", *_results(facts), ""]
    lines += ["## Written with", "", *_table(facts.versions), ""]
    lines += ["## To be written by whoever passes the network on", ""]
    lines += ["What it may be used for and what not, whose data these were and on what terms, and the licence.", ""]
    return "\n".join(lines)


def _outputs(facts: Facts, inputs: Inputs) -> Iterator[str]:
    padding, levels = facts.data[1].get("padding", 1), facts.data[1].get("resolutions") or [inputs.shape[1:]]
    sizes = ", ".join("×".join(map(str, size)) for size in levels)
    yield f"- An input shows one person; its last row and column are repeated to multiples of {inputs.cell} pixels."
    yield f"- In training, a picture was as high as the person's box (or 4/3 of its width) times {padding}, and shown"
    yield f"  at {_escaped(sizes)} pixels (height×width). Crop and scale photographs alike."
    yield "- Outputs: `keypoints` (B, K, 2), pixels (x, y) of the input, 0 the centre of the first, and `score` (B, K)."
    yield f"- Joints, in their order: {', '.join(map(_escaped, inputs.joints))}."


def _inputs(facts: Facts, inputs: Inputs) -> Iterator[str]:
    letters = dict(zip(inputs.free, "LMN", strict=False))
    sizes = ", ".join(["B", *(letters.get(axis, str(size)) for axis, size in enumerate(inputs.shape, 1))])
    free = [
        f"{letters[axis]} of {least} to {most}" if most else f"{letters[axis]} of {least} or more"
        for axis, (least, most) in inputs.free.items()
    ]
    ranges = ", ".join(["B of any size", *free, *([] if free else ["the other sizes fixed"])])
    yield f"- An input is a batch ({sizes}) of `{inputs.dtype}`, {ranges}, as the data set stores it."
    if facts.preprocessing is None:
        yield "- These files do not hold the data module's preprocessing, which is custom code: an input is the"
        yield "  output of that code."
    elif facts.preprocessing:
        yield f"- The network begins with its preprocessing: {_code(json.dumps(facts.preprocessing))}."
    if facts.class_names is not None:
        yield f"- Outputs, in their order: {', '.join(_escaped(name) for name in facts.class_names)}."


def _results(facts: Facts) -> Iterator[str]:
    if not facts.metrics:
        yield "The round of this checkpoint was not evaluated."
        return
    yield f"After {counted(facts.rounds, 'round')}, on {facts.evaluated_on} data:"
    yield ""
    yield "| metric | value | of |"
    yield "|---|---|---|"
    for name, value in facts.metrics.items():
        yield f"| {_code(name)} | {value:.6g} | {_escaped(meaning_of(name, facts.evaluated_on))} |"


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
    """A text without meaning to Markdown or HTML, in one line."""
    marked = _MARKS.sub(lambda found: f"\\{found[0]}", _line(text))
    return re.sub("|".join(map(re.escape, _HTML)), lambda found: _HTML[found[0].lower()], marked, flags=re.I)


def _code(text: str) -> str:
    """A text as inline code, inside a table too."""
    line = _line(text).replace("|", "\\|")
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    return f"{fence}{line}{fence}" if len(fence) == 1 else f"{fence} {line} {fence}"


def _line(text: str) -> str:
    """A text in one line, without invisible characters."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())
