"""Folders of runs on a node: which are listed, and which are removed."""

from __future__ import annotations

import os
import re
from datetime import datetime
from pathlib import Path

import pytest
import torch

from lit_fed.command.cli import main
from lit_fed.federation.ends import sole_user
from lit_fed.federation.node.kept import Kept

OLD, LAST, NEW = "0123456789abcdef", "1123456789abcdef", "2123456789abcdef"
PROMISES = ("sums.pt", "sums.key", "frozen.pt", "node.log", "sums/given.jsonl", f"sums/{OLD}.words", "account.jsonl")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node's folder after two runs, of which the second's end is saved, and in a third."""
    states = tmp_path / "state" / "states"
    for place, name in enumerate((OLD, LAST, NEW)):
        (states / name / "packs").mkdir(parents=True)
        (states / name / "packs" / "a").write_bytes(bytes(2_500_000 * (place + 1)))
        for path in (states / name / "packs" / "a", states / name / "packs", states / name):
            when = datetime(2026, 3, place + 1, 12, 30).timestamp()
            os.utime(path, (when, when))
    (states / "sums").mkdir()
    for name in PROMISES:
        (states / name).write_text("kept")
    Kept(LAST, 0, {0: None}, {"model": {"w": torch.zeros(1)}}, {}, {}, {}).write(states)
    return tmp_path / "state"


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["clean", *words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_runs_are_listed_with_size_and_date(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(node.rglob("*"))
    main(["clean", "--state_dir", str(node)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:5] for line in lines] == [
        [OLD, "2.5", "MB", "2026-03-01", "12:30"],
        [LAST, "5.0", "MB", "2026-03-02", "12:30"],
        [NEW, "7.5", "MB", "2026-03-03", "12:30"],
    ]
    assert [" ".join(line[5:]) for line in lines] == ["", "its end is saved for predictions", ""]
    assert set(before) <= set(node.rglob("*"))


def test_named_runs_are_removed_and_nothing_that_keeps_a_promise(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["clean", "--state_dir", str(node), "--remove", OLD, NEW])
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines()] == ["removed", "predictions", "removed"]
    states = node / "states"
    assert {path.name for path in states.iterdir() if path.is_dir()} == {LAST, "sums"}
    assert [(states / name).read_text() for name in PROMISES] == ["kept"] * len(PROMISES)
    assert (states / "last.pt").is_file()
    main(["clean", "--state_dir", str(node)])
    assert capsys.readouterr().out.split()[0] == LAST


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([LAST], f"--remove {LAST} is the run whose end is in .*last.pt; remove that file first"),
        (["sums"], "--remove sums is not a run in .*states; leave --remove out to list the runs"),
        (["../states"], "--remove ../states is not a run in"),
        (["3123456789abcdef"], "--remove 3123456789abcdef is not a run in"),  # a link to elsewhere
    ],
)
def test_what_is_no_run_or_in_use_is_refused_and_nothing_is_removed(
    node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], expected: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (node / "states" / "3123456789abcdef").symlink_to(tmp_path / "elsewhere")
    told = refusal(capsys, "--state_dir", str(node), "--remove", OLD, *names)
    assert re.search(expected, told), told
    assert (node / "states" / OLD / "packs" / "a").is_file()
    assert (tmp_path / "elsewhere").is_dir()


def test_the_folder_of_a_running_node_is_left_alone(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sole_user(node, "--state_dir"):
        told = refusal(capsys, "--state_dir", str(node), "--remove", OLD)
    assert f"is used by process {os.getpid()}" in told
    assert (node / "states" / OLD).is_dir()


def test_a_folder_of_something_else_is_refused_and_an_end_that_cannot_be_read(
    node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no folder states; give the folder that the node was" in refusal(capsys, "--state_dir", str(tmp_path))
    assert not (tmp_path / ".lock").exists()
    (node / "states" / "last.pt").write_bytes(b"half")
    assert "last.pt cannot be read" in refusal(capsys, "--state_dir", str(node), "--remove", LAST)
    assert (node / "states" / LAST).is_dir()
