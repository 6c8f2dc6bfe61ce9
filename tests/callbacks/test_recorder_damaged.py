"""Files of a run that somebody opened, saved otherwise, or lost: no row is deleted that cannot be read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fed.callbacks import Callback
from lit_fed.errors import CheckpointError
from lit_fed.methods import FedAvg
from tests.support import LeastSquares, Points, fit, rows, trainer

CSV = ("metrics.csv", "clients.csv")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(folder: Path, rounds: int, config: str = "a: 1\n", ckpt_path: str | None = None, **kwargs: Any) -> Path:
    made = trainer(folder, max_rounds=rounds, **kwargs)
    if config:
        made.describe(config)
    made.fit(LeastSquares(), Points(), FedAvg(), ckpt_path)
    return made.log_dir


def without_header(content: bytes) -> bytes:
    return content.split(b"\n", 1)[1]


def latin(content: bytes) -> bytes:
    return content.replace(b"loss", "größe".encode("latin-1"))


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "semicolons": (lambda content: content.replace(b",", b";"), "line 1 does not begin with round,"),
    "tabs": (lambda content: content.replace(b",", b"\t"), "line 1 does not begin with round,"),
    "lost header": (without_header, "line 1 does not begin with round,"),
    "latin-1": (latin, "line [0-9]: 'utf-8' codec can't decode byte 0xf6"),
    "utf-16": (lambda content: content.decode().encode("utf-16"), "line 1: 'utf-8' codec can't decode byte 0xff"),
    "binary": (lambda content: bytes(range(256)) * 9, "line 1 does not begin with round,"),
    "zeros": (lambda content: b"\0" * len(content), "line 1 does not begin with round,"),
    "a line too long": (
        lambda content: content.replace(b"\n", b",7\n", 2),
        "line 3 has [0-9]+ cells and line 1 has [0-9]+",
    ),
    "a line cut in the middle": (lambda content: content[:-20] + b"\n" + content[-9:], "cells and line 1 has"),
    "words": (
        lambda content: content + b"Sum" + b"," * (content.split(b"\n")[0].count(b",")) + b"\n",
        "begins with 'Sum'",
    ),
    "a huge round": (
        lambda content: content + b"9" * 5000 + b"," * (content.split(b"\n")[0].count(b",")) + b"\n",
        "begins with '99999999999999999999', not with a round",
    ),
}


@pytest.mark.parametrize("target", ["last", "best"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", CSV)
def test_what_cannot_be_read_is_not_rewritten(tmp_path: Path, name: str, damage: str, target: str) -> None:
    folder = run(tmp_path, 2)
    change, why = DAMAGES[damage]
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    before = contents(folder)
    with pytest.raises(
        CheckpointError, match=rf"{name} cannot be read \(.*({why}).*\); repair it, or move it"
    ) as caught:
        run(tmp_path, 3, "a: 2\n", target)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == before
    assert list((tmp_path / "lightning_logs").iterdir()) == [folder]


@pytest.mark.parametrize("name", CSV)
@pytest.mark.parametrize(
    "change", [lambda c: b"\xef\xbb\xbf" + c, lambda c: c.replace(b"\n", b"\r\n")], ids=["mark", "crlf"]
)
def test_what_a_spreadsheet_adds_is_taken_off_again(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes]
) -> None:
    folder = run(tmp_path, 2)
    before = (folder / name).read_bytes()
    (folder / name).write_bytes(change(before))
    run(tmp_path, 3, ckpt_path="last")
    assert (folder / name).read_bytes().startswith(before)
    assert [row["round"] for row in rows(folder / "metrics.csv")] == ["0", "1", "2"]


@pytest.mark.parametrize("name", CSV)
@pytest.mark.parametrize("empty", [False, True])
def test_lost_rows_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, empty: bool) -> None:
    folder = run(tmp_path, 3)
    (folder / name).unlink()
    if empty:
        (folder / name).touch()
    run(tmp_path, 4, ckpt_path="last")
    # Bytes down and up, the loss, the time, and the loss in the test: 5 rows for each of 2 clients, 10 a round.
    lost = "3 of the 3" if name == "metrics.csv" else "30 of the 30 rows of the 3"
    assert f"{folder / name} lacks {lost} rounds before this one\n" in capsys.readouterr().out
    assert {row["round"] for row in rows(folder / name)} == {"3"}
    run(tmp_path, 5, ckpt_path="last")
    if name == "metrics.csv":
        assert f"{folder / name} lacks 3 of the 4 rounds before this one\n" in capsys.readouterr().out
    assert {row["round"] for row in rows(folder / name)} == {"3", "4"}


@pytest.mark.parametrize("lines", [1, 4, 8])
@pytest.mark.parametrize("place", [1, 5, -9])
def test_rows_of_clients_that_somebody_deleted_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: int, lines: int
) -> None:
    path = run(tmp_path, 3) / "clients.csv"
    content = path.read_bytes().splitlines(keepends=True)
    assert len(content) == 1 + 3 * 10
    place %= len(content)
    path.write_bytes(b"".join([*content[:place], *content[place + lines :]]))
    run(tmp_path, 4, ckpt_path="last")
    assert f"{path} lacks {lines} of the 30 rows of the 3 rounds before this one\n" in capsys.readouterr().out
    run(tmp_path, 5, ckpt_path="last")
    assert "lacks" not in capsys.readouterr().out


def test_a_record_that_cannot_be_read_is_no_damaged_one(tmp_path: Path) -> None:
    """To read the memory of a process from its beginning on is an input/output error."""
    for name in (*CSV, "config.yaml"):
        folder = run(tmp_path / name, 2)
        (folder / name).unlink()
        (folder / name).symlink_to("/proc/self/mem")
        with pytest.raises(CheckpointError, match=rf"{name} cannot be read: Input/output error; it may be intact"):
            run(tmp_path / name, 3, "a: 2\n", "last")
        assert (folder / name).is_symlink()


def test_what_a_killed_run_left_half_written_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = run(tmp_path, 2)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead, alive = gone.stdout.decode().strip(), os.getppid()
    ours = (
        "config.yaml",
        "config.until_round_0.yaml",
        "clients.csv",
        "metrics.csv",
        "partition.json",
        "privacy.md",
        "left_out.png",
    )
    deeper = ("checkpoints/.last.ckpt", "checkpoints/.best.ckpt", "checkpoints/clients/.0.r1.states")
    removed = [folder / f".{name}.{dead}.tmp" for name in ours] + [folder / f"{name}.{dead}.tmp" for name in deeper]
    left = [folder / f".config.yaml.{alive}.tmp", folder / f".notes.md.{dead}.tmp", folder / ".config.yaml.tmp"]
    left += [folder / "checkpoints" / f".mine.{dead}.tmp", folder / f"config.yaml.{dead}.tmp"]
    for path in (*removed, *left):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    run(tmp_path, 3, ckpt_path="last")
    assert [path for path in removed if path.exists()] == []
    assert [path for path in left if not path.exists()] == []


# ---------------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    "content",
    [
        b"\x00\xff\xfe",
        "größe: 1".encode("latin-1"),
        b"a: [1",
        b"just a text",
        b"- 1\n",
        b"",
        b"a: !!python/name:os.system",
    ],
)
@pytest.mark.parametrize("name", ["config.yaml", "config.until_round_0.yaml"])
def test_a_configuration_that_cannot_be_read_is_not_replaced(tmp_path: Path, name: str, content: bytes) -> None:
    folder = run(tmp_path, 2)
    (folder / name).write_bytes(content)
    before = contents(folder)
    with pytest.raises(CheckpointError, match=rf"{name} is not a configuration, and resuming would replace it"):
        run(tmp_path, 3, "a: 2\n", "last")
    assert contents(folder) == before
    assert run(tmp_path, 3, "", "last") == folder  # where nothing would be written, nothing is read


def configurations(folder: Path) -> dict[str, Any]:
    return {path.name: yaml.safe_load(path.read_text())["a"] for path in folder.glob("config*")}


class Dying(Callback):
    """Ends the process's work in a round."""

    def __init__(self, round_idx: int) -> None:
        self.round_idx = round_idx

    def on_round_end(self, run: Any, record: Any) -> None:
        if record.round_idx == self.round_idx:
            raise KeyboardInterrupt


def test_a_configuration_that_trained_no_round_is_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path, 2, "a: 1\n")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 9, "a: 2\n", "last", callbacks=[Dying(2)])  # its first round never ends
    assert configurations(folder) == {"config.yaml": 2, "config.until_round_1.yaml": 1}
    capsys.readouterr()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 9, "a: 3\n", "last", callbacks=[Dying(3)])
    assert configurations(folder) == {"config.yaml": 3, "config.until_round_1.yaml": 1}
    assert "resumed with different settings from round 2 on: a\n" in capsys.readouterr().out
    run(tmp_path, 4, "a: 4\n", "last")  # the third trained round 2
    assert configurations(folder) == {"config.yaml": 4, "config.until_round_1.yaml": 1, "config.until_round_2.yaml": 3}


def test_back_to_the_configuration_that_trained_last_is_no_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path, 2, "a: 1\n")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 9, "a: 2\n", "last", callbacks=[Dying(2)])
    capsys.readouterr()
    run(tmp_path, 3, "a: 1\n", "last")
    assert configurations(folder) == {"config.yaml": 1}
    assert "other settings" not in capsys.readouterr().out


def test_a_new_folder_says_what_its_earlier_rounds_were_trained_with(tmp_path: Path) -> None:
    folder = run(tmp_path, 1, "a: 1\n")
    run(tmp_path, 3, "a: 2\n", "last")
    assert configurations(folder) == {"config.yaml": 2, "config.until_round_0.yaml": 1}
    best = run(tmp_path, 4, "a: 3\n", "best")  # the loss falls in every round
    assert best != folder
    assert configurations(best) == {"config.yaml": 3, "config.until_round_0.yaml": 1, "config.until_round_2.yaml": 2}


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    class Full(Callback):
        """Puts the record on a full disk."""

        def on_round_start(self, run: Any, round_idx: int, plan: Any) -> None:
            (run.log_dir / "clients.csv").unlink()
            (run.log_dir / "clients.csv").symlink_to("/dev/full")

    with pytest.raises(CheckpointError, match=r"cannot write .*clients\.csv: .*No space left on device"):
        fit(tmp_path, max_rounds=2, callbacks=[Full()])
