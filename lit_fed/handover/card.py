"""Facts about a trained network, from its checkpoint and its run's folder, and its model card in Markdown."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

import lit_fed
from lit_fed.callbacks.progress import meaning_of, protocol_of
from lit_fed.engine.loop.checkpoint import run_folder
from lit_fed.engine.method.wrapper import STATE_PREFIX
from lit_fed.errors import CheckpointError
from lit_fed.printing import counted
from lit_fed.yaml_text import read_yaml

_TRAINER = ("max_rounds", "local_epochs", "local_steps", "limit_train_batches", "seed", "precision")
_MODEL = ("network", "network_args", "optimizer", "lr_scheduler")
_PACKAGES = ("lightning", "torch", "torchvision", "timm", "numpy")


@dataclass(frozen=True)
class Facts:
    """The facts on a card.

    Args:
        task: The task's class.
        method: The method's class.
        rounds: Rounds of training.
        data: The data module's class, and its settings without paths.
        algorithm: The method's settings.
        training: Settings of local training.
        clients: Counts of clients and samples, from the run's folder; empty of a private run.
        partition_sha256: Fingerprint of the partition; None of a private run, which it would tell the data of.
        metrics: Protocols' metrics of the checkpoint's round.
        evaluated_on: ``test`` or ``validation``.
        preprocessing: Steps from stored inputs to the network; None for code of the data module.
        class_names: Names of the outputs.
        versions: Versions of the packages that wrote the files.
        wrappers: The wrappers' facts by name.
    """

    task: str
    method: str
    rounds: int
    data: tuple[str, dict[str, Any]]
    algorithm: dict[str, Any]
    training: dict[str, Any]
    clients: dict[str, Any]
    partition_sha256: str | None
    metrics: dict[str, float]
    evaluated_on: str
    preprocessing: list[dict[str, Any]] | None
    class_names: list[str] | None
    versions: dict[str, str] = field(default_factory=dict)
    wrappers: dict[str, dict[str, Any]] = field(default_factory=dict)


def facts_of(content: Mapping[str, Any], path: Path) -> Facts:
    """Read the facts from a checkpoint and its run's folder.

    Args:
        content: The checkpoint.
        path: Its file.
    """
    config = _settings(content["config"], path)
    trainer, inputs = config.get("trainer") or {}, content["inputs"]
    metrics = {name: value for name, value in content["metrics"].items() if protocol_of(name)}
    training = {key: trainer[key] for key in _TRAINER if key in trainer}
    training |= {"participation": trainer["participation"]} if trainer.get("participation") else {}
    data = (config.get("data") or {}).get("init_args") or {}
    model = (config.get("model") or {}).get("init_args") or {}
    training |= {key: model[key] for key in _MODEL if model.get(key)}
    return Facts(
        task=", ".join(dict.fromkeys(content["tasks"].values())),
        method=content["method"],
        rounds=content["round_idx"],
        data=(str(inputs.get("source")), {key: value for key, value in data.items() if key != "root"}),
        algorithm=(config.get("algorithm") or {}).get("init_args") or {},
        training={key: value for key, value in training.items() if value is not None},
        clients={} if "apart" in content else _clients(run_folder(path)),
        partition_sha256=content.get("partition"),
        metrics=metrics,
        evaluated_on={"val": "validation"}.get(str(trainer.get("evaluate_on")), "test"),
        preprocessing=inputs.get("steps"),
        class_names=None if inputs.get("class_names") is None else list(map(str, inputs["class_names"])),
        wrappers=_wrapper_facts(content["server"]),
        versions=versions(),
    )


def _wrapper_facts(server: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Wrappers' texts and numbers for readers, by the wrapper's name; names with an underscore are left out."""
    return {
        str(key).removeprefix(STATE_PREFIX): {
            str(name): value
            for name, value in kept.items()
            if isinstance(value, str | int | float) and not str(name).startswith("_")
        }
        for key, kept in server.items()
        if str(key).startswith(STATE_PREFIX) and isinstance(kept, Mapping)
    }


def _settings(config: str, path: Path) -> Mapping[str, Any]:
    """The configuration in a checkpoint.

    Raises:
        CheckpointError: If the text is not a configuration.
    """
    try:
        content = read_yaml(config) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise CheckpointError(f"{path} holds no configuration: {' '.join(str(error).split())[:200]}") from error
    parts = (
        [content, *(content.get(key) or {} for key in ("trainer", "data", "model", "algorithm"))]
        if isinstance(content, Mapping)
        else [content]
    )
    if not all(isinstance(part, Mapping) for part in parts) or not all(
        isinstance(part.get("init_args") or {}, Mapping) for part in parts
    ):
        raise CheckpointError(f"{path} holds no configuration, but {str(content)[:80]!r}")
    return content


def versions() -> dict[str, str]:
    """Versions of the packages on which a run's numbers depend."""
    found = {"lit_fed": lit_fed.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _clients(run: Path | None) -> dict[str, Any]:
    """Counts of clients and samples; empty without a run's folder."""
    try:
        record = json.loads((run / "partition.json").read_text(encoding="utf-8")) if run is not None else {}
        sizes = [len(client["indices"]) for client in record["clients"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    if not sizes:
        return {}
    return {
        "clients": len(sizes),
        "training samples": sum(sizes),
        "samples a client (least, median, most)": f"{min(sizes)}, {np.median(sizes):g}, {max(sizes)}",
    }


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
    lines += run_sections(facts)
    lines += ["## To be written by whoever passes the network on", ""]
    lines += ["What it may be used for and what not, whose data these were and on what terms, and the licence.", ""]
    return "\n".join(lines)


def run_sections(facts: Facts) -> list[str]:
    """The part of a card about the run: data, training, privacy and the like, results, versions."""
    lines = ["## Data", "", *table({"data": facts.data[0], **facts.clients, **facts.data[1]})]
    lines += [f"| partition, SHA-256 | {_code(facts.partition_sha256)} |"] if facts.partition_sha256 else []
    lines += [""]
    training = {"method": facts.method, "trained for": counted(facts.rounds, "round"), **facts.algorithm}
    lines += ["## Training", "", *table(training)]
    lines += [*list(table(facts.training))[2:], ""]
    for name, kept in facts.wrappers.items():
        lines += [f"## {_escaped(name.capitalize())}", "", *table(kept), ""]
    lines += ["## Results", "", *_results(facts), ""]
    return [*lines, "## Written with", "", *table(facts.versions), ""]


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


def table(entries: Mapping[str, Any]) -> Iterator[str]:
    """Names and values as a table of two columns; values that are None are left out."""
    yield "| | |"
    yield "|---|---|"
    for key, value in entries.items():
        if value is not None:
            cell = (
                _escaped(value) if isinstance(value, str) else _code(json.dumps(value, ensure_ascii=False, default=str))
            )
            yield f"| {_escaped(key)} | {cell} |"


_MARKS = re.compile(r"[\\`*\[\]|~$!]|^[#+\-=]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "://": "&#58;//", "www.": "www&#46;"}  # links, too


def _escaped(text: str) -> str:
    """A text without meaning to Markdown or HTML, in one line."""
    marked = _MARKS.sub(lambda match: f"\\{match[0]}", _line(text))
    return re.sub("|".join(map(re.escape, _HTML)), lambda match: _HTML[match[0].lower()], marked, flags=re.I)


def _code(text: str) -> str:
    """A text as inline code, inside a table too."""
    line = _line(text).replace("|", "\\|")
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    return f"{fence}{line}{fence}" if len(fence) == 1 else f"{fence} {line} {fence}"


def _line(text: str) -> str:
    """A text in one line, without invisible characters."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
