"""Whatever a study calls its rows and columns is shown as it is, and whatever it calls a file stays in its folder."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.studies import run_studies
from lit_fed.studies.file.study import read_study
from lit_fed.studies.pages import figures
from lit_fed.studies.results.results import collect
from tests.studies.support import TINY, finish, grid_of, write_study

ODD = [
    "costs $5",
    "$\\frac{1}{",
    "$a$ and $b$",
    "[/b] ends nothing",
    "[lr=0.1]",
    "[bold red]not red",
    ":warning: no sign",
    "_hidden",
    "_",
    "back\\slash\\",
    "50 %",
    "a|b <i>c</i> &amp;",
]
METRICS = "round,global/acc\n0,0.5\n1,0.75\n"


def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, label: str) -> tuple[str, list[str]]:
    """What the terminal and the pictures show of a study whose parts are all called like this."""
    rows = {name: {**TINY["rows"][name], "label": f"{label} {name}"} for name in ("fedavg", "prox")}
    columns = {"iid": {**TINY["columns"]["iid"], "label": f"{label} iid"}}
    grid = grid_of(tmp_path, title=f"{label} title", rows=rows, columns=columns)
    for row in rows:
        finish(grid, row, "iid", 0, METRICS)
    results = collect(grid)
    texts: list[str] = []
    save = Figure.savefig

    def saved(figure: Any, *args: Any, **kwargs: Any) -> None:
        save(figure, *args, **kwargs)  # draws everything, and fails on a formula that is none
        texts.extend(text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")))

    monkeypatch.setattr(Figure, "savefig", saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures.draw_bars(results, tmp_path / "bars.png")
        figures.draw_curves(results, tmp_path / "curves.png")
    console = Console(file=io.StringIO(), width=200)
    run_studies._show(results, console)
    run_studies._summarise([results], tmp_path, console)
    said = console.file
    assert isinstance(said, io.StringIO)
    return said.getvalue(), texts


@pytest.mark.parametrize("label", ODD)
def test_any_label_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, label: str) -> None:
    said, texts = shown(monkeypatch, tmp_path, label)
    for name in ("fedavg", "prox", "iid", "title"):
        assert f"{label} {name}" in said
    drawn = [text.replace("\\$", "$").removeprefix(" ") for text in texts]
    assert drawn.count(f"{label} fedavg") >= 2  # the legends of both pictures
    assert drawn.count(f"{label} prox") >= 2
    assert drawn.count(f"{label} iid") >= 2  # a tick and a title


def test_the_state_of_a_cell_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = grid_of(tmp_path)
    for cell in grid.cells:
        cell.write_record(status="failed", error="[/b] KeyError: 'x[0]'")
    console = Console(width=200)
    run_studies._dry_run([grid], [(grid, cell) for cell in grid.cells[:1]], _Options(), console)
    assert "failed: [/b] KeyError: 'x[0]'; " in capsys.readouterr().out


class _Options:
    jobs = 1


# ---------------------------------------------------------------------- names that become folders


@pytest.mark.parametrize(
    "name", ["../../esc", "..", ".", "/tmp/esc", "a/b", "a\\b", ".hidden", "", "a\nb", "a\0b", "x" * 300, "C:x"]
)
def test_a_profile_that_would_lead_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    path = write_study(tmp_path, profiles={"pocket": {}, name: {}})
    with pytest.raises(ConfigError, match=r"tiny\.yaml: the profile's name '") as caught:
        read_study(path, name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../../esc", "a/b", "a\0b", "a\x1bb", "a:b", "x" * 300])
@pytest.mark.parametrize("part", ["rows", "columns"])
def test_a_row_or_column_that_would_lead_elsewhere_is_refused(tmp_path: Path, part: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"tiny\.yaml: {part}: .* is not a valid name; it must be one word"):
        read_study(write_study(tmp_path, **{part: {name: {}}}), "pocket")


# ---------------------------------------------------------------------- records of cells


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("round;global/acc\n0;0.5\n", "line 1 does not begin with round,"),
        ("0,0.5\n1,0.75\n", "line 1 does not begin with round,"),
        ("round,global/acc\n0,0.5,3\n", "line 2 has 3 cells and line 1 has 2"),
        ("round,global/acc\n0,good\n", "a global/acc that is not a number .could not convert"),
    ],
)
def test_a_damaged_table_of_a_finished_cell_is_named(tmp_path: Path, content: str, why: str) -> None:
    grid = grid_of(tmp_path)
    for row in ("fedavg", "prox"):
        finish(grid, row, "iid", 0, content)
    with pytest.raises(CheckpointError, match=rf"fedavg/iid/seed_0/lightning_logs/version_0/metrics\.csv.*{why}"):
        collect(grid)


@pytest.mark.parametrize(
    "content", ["[]", "3", "{", '{"seconds": "long"}', '{"made_with": []}', '{"status": 1}', "\xff"]
)
def test_a_damaged_record_of_a_cell_is_none(tmp_path: Path, content: str) -> None:
    grid = grid_of(tmp_path)
    finish(grid, "fedavg", "iid", 0, METRICS)
    (grid.cells[0].folder / "cell.json").write_text(content, encoding="latin-1")
    assert grid.cells[0].record() == {}
    assert not grid.cells[0].done
