"""Pages that are made from the code and its configurations: a page a method, the reference, the studies."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import chdir
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.studies.file.study import Study, read_study
from lit_fed.studies.results.register_lines import OURS, PAPERS, is_ours, texts_of
from website.links import ROOT

# The rooms that a user imports from, and what stands above their names.
ROOMS = {
    "lit_fed": "What a program begins with.",
    "lit_fed.data": "Populations of clients: data sets, partitions, transforms; [your own data](../own_data.md).",
    "lit_fed.methods": "Methods have [pages of their own](../methods.md); what else belongs to them follows.",
    "lit_fed.tasks": "What is learnt; any other `LightningModule` may stand in their place.",
    "lit_fed.poses": "Persons with key points: data, networks, losses, task and metrics; [poses](../poses.md).",
    "lit_fed.networks": "Networks by name.",
    "lit_fed.losses": "Pure functions of tensors.",
    "lit_fed.callbacks": "Listeners of a run.",
    "lit_fed.algorithm": "All that a method is written with: [your own method](../own_method.md).",
    "lit_fed.protocols": "Who is tested on what: [which accuracy](../protocols.md).",
    "lit_fed.participation": "Who takes part: [heterogeneous clients](../heterogeneous.md#who-takes-part).",
    "lit_fed.robust": "Rules in place of a mean, and attacks: [robustness](../robustness.md).",
    "lit_fed.codecs": "How payloads are packed for the wire, and how to write another.",
}
HOOKS = (
    *("adapt", "setup", "split", "initial_state", "start", "phases", "objective", "correct", "finish", "broadcast"),
    *("address", "reducer", "step"),
)


@cache
def generated_pages() -> dict[str, str]:
    """All of them, by their place on the site."""
    pages = {f"methods/{name}.md": _method_page(name, cls) for name, cls in methods().items()}
    pages |= {f"reference/{room}.md": _reference_page(room) for room in ROOMS}
    return pages | {"results/studies.md": _studies_page()}


def methods() -> dict[str, type[Algorithm[Any]]]:
    """The methods that configurations know by a short name, by it."""
    package = import_module("lit_fed.methods")
    found = {name: getattr(package, name) for name in sorted(package.__all__)}
    return {name: one for name, one in found.items() if isinstance(one, type) and issubclass(one, Algorithm)}


def public_names(room: str) -> list[str]:
    """What a room exports."""
    return sorted(import_module(room).__all__, key=str.lower)


# --- methods ---------------------------------------------------------------------------------------------------------


def _method_page(name: str, cls: type[Algorithm[Any]]) -> str:
    # The class's own heading is the page's.
    own = f"::: lit_fed.methods.{name}\n    options: {{members: false, heading_level: 1}}"
    parts = [f"---\ntitle: {name}\n---", own, "## Paper", _citation(cls)]
    parts += ["## Needs", _needs(cls)]
    if files := [path for path, settings in _method_files() if settings["class_path"] == name]:
        parts += ["## Configuration", *(_file(path) for path in files)]
        parts += ["## Runs on", _matrix([path.stem for path in files])]
    parts += ["## What it does where", _hooks(cls)]
    parts += ["## Pictures", _pictures(cls)]
    parts += ["## In the studies", _places(name)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _citation(cls: type) -> str:
    """The paper, which every method's file begins with."""
    text = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")
    return text.partition("\n\n")[2].strip() or text


def _needs(cls: type[Algorithm[Any]]) -> str:
    """What it needs of the task, in the words of the guide to one's own methods."""
    table = (ROOT / "docs/own_method.md").read_text(encoding="utf-8").partition("## Needs")[2]
    told = {
        need: re.sub(r"\]\((?!https?:)", "](../", words)
        for needs, words in re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
        for need in re.findall(r"`(\w+)`", needs)
    }
    if not cls.needs:
        return "Nothing beyond a `LightningModule`, as long as its settings ask for no more."
    rows = [f"| `{need}` | {told.get(need, '')} |" for need in sorted(cls.needs)]
    return "\n".join(["| of the task and the data | what for |", "|---|---|", *rows])


@cache
def _method_files() -> list[tuple[Path, dict[str, Any]]]:
    paths = sorted((ROOT / "configs/method").glob("*.yaml"))
    return [(path, yaml.safe_load(path.read_text(encoding="utf-8"))["algorithm"]) for path in paths]


def _file(path: Path) -> str:
    where, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8").strip()
    command = f"lit-fed fit -c configs/quickstart.yaml -c {where}"
    return f"[`{where}`](../../{where})\n\n```yaml\n{text}\n```\n\n```bash\n{command}\n```"


def _matrix(files: Iterable[str]) -> str:
    table = re.search(r"<!-- matrix:begin -->\n(.*?)<!-- matrix:end -->", _text("docs/methods.md"), re.DOTALL)
    assert table is not None
    lines = table[1].splitlines()
    rows = [line for line in lines[2:] if any(line.startswith(f"| `{file}` |") for file in files)]
    what = "What these models are: [which method runs on what](../methods.md#which-method-runs-on-what)."
    return "\n".join([*lines[:2], *rows, "", what])


def _hooks(cls: type) -> str:
    """The hooks in which it differs from FedAvg, by the first line of what they say."""
    rows = []
    for hook in HOOKS:
        owner = next(base for base in cls.__mro__ if hook in vars(base))
        if owner is cls or owner.__name__ not in ("FedAvg", "Algorithm"):
            words = (inspect.getdoc(getattr(owner, hook)) or "").partition("\n")[0].replace("|", "\\|")
            rows.append(f"| `{hook}` | {words} |")
    intro = "Hooks in which it is not as FedAvg; [all thirteen](../own_method.md#the-thirteen-hooks)."
    return "\n".join([intro, "", "| hook | does |", "|---|---|", *rows]) if rows else "Nothing but what FedAvg does."


def _pictures(cls: type) -> str:
    owner = next(base for base in cls.__mro__ if "figures" in vars(base))
    common = "Every run has the partition, who took part, and what the task shows: [loggers](../loggers.md)."
    if owner is Algorithm:
        return common
    words = (inspect.getdoc(owner.figures) or "").partition("\n")[0]  # type: ignore[attr-defined]
    return f"Of its own: {words[0].lower()}{words[1:]} {common}"


# --- studies ---------------------------------------------------------------------------------------------------------


@cache
def studies() -> dict[str, dict[str, Study]]:
    """Every study's profiles, by its name."""
    found: dict[str, dict[str, Study]] = {}
    with chdir(ROOT):  # what a study names is relative to the repository
        for path in sorted(Path("configs/papers").glob("*/studies/*.yaml")):
            profiles = yaml.safe_load(path.read_text(encoding="utf-8"))["profiles"]
            found[path.stem] = {profile: read_study(path, profile) for profile in profiles}
    return found


@cache
def _named(config: str) -> str | None:
    """The method that a configuration file names."""
    algorithm = (yaml.safe_load(_text(config)) or {}).get("algorithm")
    return _short(algorithm.get("class_path") if isinstance(algorithm, dict) else algorithm)


def _short(name: Any) -> str | None:
    return str(name).rpartition(".")[2] if name else None


def _method_of(study: Study, row: str, column: str) -> str | None:
    """The method of a cell: the last that any of its files or settings names."""
    found = None
    for part in (study, study.rows[row], study.columns[column]):
        for config in part.configs:
            found = _named(config) or found
        for key, value in part.set.items():
            if key in ("algorithm", "algorithm.class_path"):
                found = _short(value.get("class_path") if isinstance(value, dict) else value) or found
    return found


def rows_with(name: str) -> Iterator[tuple[str, Study, list[str]]]:
    """Studies with a method among their rows or columns, in the first profile that has it: name, profile, labels."""
    for study, profiles in studies().items():
        for profile in profiles.values():
            rows = [row for row in profile.rows if any(_method_of(profile, row, c) == name for c in profile.columns)]
            if rows:
                yield study, profile, [profile.rows[row].label for row in rows]
                break


def _places(name: str) -> str:
    lines = [
        f"- [{study.title}](../results/studies.md#{place}) ({study.source or 'of no paper'}): {', '.join(labels)}"
        for place, study, labels in rows_with(name)
    ]
    return "\n".join(lines) or "None of the studies has it."


def _studies_page() -> str:
    parts = [
        "# Every study",
        "The grids in `configs/papers/*/studies/`, with what their papers claim. How one is run, and how a claim is "
        "decided: [studies](../studies.md); what came of them: [results](README.md).",
    ]
    results = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/results").glob("*.md"))}
    for name, profiles in studies().items():
        study = next(iter(profiles.values()))
        where = study.path.as_posix()
        source = f"{study.source or 'Of no paper'}."
        parts += [f"## {name}", f"**{study.title}.** {source}", " ".join(study.about.split())]
        parts.append("\n".join(["```bash", *(f"lit-fed study -c {where} --profile {one}" for one in profiles), "```"]))
        parts.append(f"File: [`{where}`](../../{where})")
        if told := [path for path, text in results.items() if re.search(rf"\b{name}\b", text)]:
            parts.append("Results: " + ", ".join(f"[{path.stem}]({path.name})" for path in told))
        parts.append("\n".join(f"- `{profile}`: {_shape(one)}" for profile, one in profiles.items()))
        texts = list(zip(study.claims, texts_of(study), strict=True))
        for heading, ours in ((PAPERS, False), (OURS, True)):
            if claims := [claim.says or claim.text for claim, text in texts if is_ours(text) == ours]:
                parts += [f"{heading}:", "\n".join(f"- {words}" for words in claims)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _shape(study: Study) -> str:
    rows, columns = ([one.label for one in part.values()] for part in (study.rows, study.columns))
    return f"{', '.join(rows)} × {', '.join(columns)}, {len(study.seeds)} seeds"


# --- reference -------------------------------------------------------------------------------------------------------


def _reference_page(room: str) -> str:
    parts = [f"# {room}", ROOMS[room]]
    own = methods() if room == "lit_fed.methods" else {}
    if own:
        rows = [f"| [`{name}`](../methods/{name}.md) | {_first_line(cls)} |" for name, cls in own.items()]
        parts.append("\n".join(["| method | in a line |", "|---|---|", *rows]))
    module = import_module(room)
    for name in public_names(room):
        if name in own:
            continue
        thing = getattr(module, name)
        if getattr(thing, "__module__", room).partition(".")[0] != "lit_fed" and inspect.isclass(thing):
            parts += [f"## {name}", f"`{thing.__module__}.{thing.__qualname__}`, as it is."]  # Lightning's own
        else:
            parts.append(f"::: {room}.{name}")
    return "\n\n".join(parts) + "\n"


def _first_line(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0].replace("|", "\\|")


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
