"""A run's files are changed in every place, and each change is found and named."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.callbacks import Checkpoint
from lit_fed.record.check import Check
from tests.support import Points, fit

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four rounds of four clients; line 0 is the start, line r + 1 round r, and line 5 the end."""
    folder = tmp_path_factory.mktemp("whole")
    keep = Checkpoint(keep_last=9)
    made = fit(folder, data=Points(4), max_rounds=4, record=True, callbacks=[keep])
    (made.log_dir / "config.yaml").write_text("", encoding="utf-8")  # as no command line has started it
    return made.log_dir


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def test_an_unchanged_run_is_whole(run: Path) -> None:
    assert list(Check(run).run()) == []
    assert Check(run).ended


def lines_of(run: Path) -> Lines:
    return [json.loads(line) for line in (run / "record.jsonl").read_text(encoding="utf-8").splitlines()]


def write(run: Path, lines: Lines, anew: bool = False) -> None:
    """Write the lines, with the hashes that they hold, or with new ones from the first line on."""
    texts, last = list[str](), "0" * 64
    for line in lines:
        texts.append(json.dumps(line | ({"previous": last} if anew else {}), sort_keys=True, separators=(",", ":")))
        last = sha256(f"{texts[-1]}\n".encode()).hexdigest()
    (run / "record.jsonl").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def edited(*place: Any, value: Any = "0" * 64, anew: bool = False) -> Callable[[Path], None]:
    """Change one field of a line."""

    def change(run: Path) -> None:
        lines: Any = lines_of(run)
        inside = lines
        for key in place[:-1]:
            inside = inside[key]
        inside[place[-1]] = value
        write(run, lines, anew)

    return change


def without(*place: Any, anew: bool = False) -> Callable[[Path], None]:
    """Remove one field or line."""

    def change(run: Path) -> None:
        lines: Any = lines_of(run)
        inside = lines
        for key in place[:-1]:
            inside = inside[key]
        del inside[place[-1]]
        write(run, lines, anew)

    return change


def reordered(order: list[int], anew: bool = False) -> Callable[[Path], None]:
    """Put lines in another order."""
    return lambda run: write(run, [lines_of(run)[line] for line in order], anew)


def with_cell(name: str, row: int, column: str, value: str | None) -> Callable[[Path], None]:
    """Change a cell of a table, or remove its row."""

    def change(run: Path) -> None:
        with open(run / name, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        columns = list(rows[0])
        if value is None:
            del rows[row]
        else:
            rows[row][column] = value
        with open(run / name, "w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, columns, lineterminator="\n")
            table.writeheader()
            table.writerows(rows)

    return change


def with_text(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        text = (run / name).read_text(encoding="utf-8")
        assert old in text
        (run / name).write_text(text.replace(old, new, 1), encoding="utf-8")

    return change


def in_checkpoint(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change a checkpoint, and save it so that its own checksums are right."""

    def write_again(run: Path) -> None:
        path = run / "checkpoints" / name
        content = torch.load(path, weights_only=True)
        change(content)
        path.unlink()  # other names of the file keep theirs
        torch.save(content, path)

    return write_again


def moved(source: str, target: str) -> Callable[[Path], None]:
    """Put one checkpoint in the place of another."""

    def change(run: Path) -> None:
        (run / target).unlink()
        shutil.copyfile(run / source, run / target)

    return change


CKPT = "checkpoints"
FOLLOWS = "record.jsonl, line {} does not follow record.jsonl, line {}"
CHANGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("the kind's broadcast", edited(2, "broadcast", "model"), FOLLOWS.format(4, 3)),
    ("a fate", edited(2, "cohort", "1", value=["late", None]), FOLLOWS.format(4, 3)),
    ("a client out of the cohort", without(3, "cohort", "2"), "round 2: cohort.2 is missing there"),
    ("an update's hash", edited(3, "updates", "2", "sha256"), FOLLOWS.format(5, 4)),
    ("an update's weight", edited(3, "updates", "2", "weight", value=7.0), FOLLOWS.format(5, 4)),
    ("an update's bytes", edited(3, "updates", "2", "bytes", value=7.0), "bytes of client.2 is 7.0 there and 8.0"),
    ("a client left out", without(3, "updates", "2"), "round 2: bytes of client.2 is missing there and 8.0 here"),
    ("a client let in", edited(3, "updates", "9", value={"bytes": 8.0, "weight": 1.0}), "bytes of client.9 is 8.0"),
    ("a server's tensor", edited(1, "server", "model.network.weight"), "after round 0, server.model.network.w"),
    ("the global model", edited(4, "global", "model"), "last.ckpt holds another hash of round 3's line"),
    ("a metric", edited(3, "metrics", "global/loss", value=0.5), "round 2: metrics.global/loss is 0.5 there"),
    ("a metric less", without(3, "metrics", "global/loss"), "round 2: metrics.global/loss is missing there"),
    ("a metric more", edited(3, "metrics", "global/acc", value=0.9), "round 2: metrics.global/acc is 0.9 there"),
    ("the clients' rows", edited(4, "rows"), "round 3: rows of clients.csv is 0"),
    ("a file's hash", edited(1, "files", "partition.json"), "partition.json is not the file"),
    ("a round's number", edited(2, "round", value=7), "record.jsonl has round 7 where 1 is due"),
    ("a line's own link", edited(2, "previous"), FOLLOWS.format(3, 2)),
    ("the threads", edited(0, "facts", "machine", "threads", value=64), FOLLOWS.format(2, 1)),
    ("a version", edited(0, "facts", "versions", "torch", value="1.0"), FOLLOWS.format(2, 1)),
    ("the data", edited(0, "facts", "data", "partition"), FOLLOWS.format(2, 1)),
    ("the configuration", edited(0, "facts", "config", value="seed: 2"), "config.yaml is not the configuration"),
    ("the end's round", edited(5, "round", value=5), "record.jsonl has round 5 where 4 is due"),
    ("the end's files", edited(5, "files", f"{CKPT}/last.ckpt"), "last.ckpt is not the file of record.jsonl"),
    ("more at the end", edited(5, "note", value="fine"), "record.jsonl ends with"),
    ("no end, and no last round", reordered([0, 1, 2, 3]), "round 3: metrics.global/loss is missing there"),
    ("a round removed", reordered([0, 1, 2, 4, 5]), "record.jsonl has round 3 where 2 is due"),
    ("two rounds exchanged", reordered([0, 1, 3, 2, 4, 5]), "record.jsonl has round 2 where 1 is due"),
    ("a round twice", reordered([0, 1, 2, 2, 3, 4, 5]), "record.jsonl has round 1 where 2 is due"),
    ("the start removed", reordered([1, 2, 3, 4, 5]), "the lines before record.jsonl, line 1 were removed"),
    ("an update, all links anew", edited(2, "updates", "3", "sha256", anew=True), "another hash of round 1's line"),
    ("a client out, anew", without(2, "updates", "3", anew=True), "round 1: bytes of client.3 is missing there"),
    ("rounds exchanged, anew", reordered([0, 1, 3, 2, 4, 5], anew=True), "record.jsonl has round 2 where 1 is due"),
    ("a metric in its table", with_cell("metrics.csv", 1, "global/loss", "0.25"), "metrics.global/loss is"),
    ("a round out of its table", with_cell("metrics.csv", 1, "", None), "round 1: metrics.global/loss is"),
    ("a client's value", with_cell("clients.csv", 9, "value", "0.25"), "rows of clients.csv is"),
    ("a client's row", with_cell("clients.csv", 9, "", None), "rows of clients.csv is"),
    ("the partition", with_text("partition.json", '"indices": [4]', '"indices": [3]'), "partition.json is not"),
    ("the partition's file gone", lambda run: (run / "partition.json").unlink(), "partition.json is not the file"),
    ("a server's bit", in_checkpoint("round=1.ckpt", lambda c: c["server"]["model"]["network.weight"].mul_(2)),
     "round=1.ckpt: after round 1, server.model.network.weight is"),
    ("a checkpoint's metrics", in_checkpoint("last.ckpt", lambda c: c["metrics"].update({"global/loss": 0.0})),
     "last.ckpt is not the file of record.jsonl: something beside"),
    ("a checkpoint's seed", in_checkpoint("round=0.ckpt", lambda c: c.update(seed=4)), "round=0.ckpt is not"),
    ("a checkpoint's link", in_checkpoint("best.ckpt", lambda c: c["callbacks"]["Record"].update(head="0" * 64)),
     "best.ckpt holds another hash"),
    ("another checkpoint", moved(f"{CKPT}/round=1.ckpt", f"{CKPT}/round=2.ckpt"), "round=2.ckpt is of round 1, and"),
    ("an older one as the last", moved(f"{CKPT}/round=1.ckpt", f"{CKPT}/last.ckpt"), "last.ckpt is of round 1, and"),
    ("an older one as the best", moved(f"{CKPT}/round=1.ckpt", f"{CKPT}/best.ckpt"), "best.ckpt is of round 1, and"),
    ("the last gone", lambda run: (run / CKPT / "last.ckpt").unlink(), "last.ckpt is not the file of"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), [one[1:] for one in CHANGES], ids=[one[0] for one in CHANGES])
def test_a_change_is_found_and_named(run: Path, change: Callable[[Path], None], named: str) -> None:
    change(run)
    found = list(Check(run).run())
    assert any(named in line for line in found), found


def test_every_field_of_every_line_is_changed_in_turn(whole: Path, tmp_path: Path) -> None:
    """In whatever place it is: each of the record's entries by itself, those with others inside, too."""
    shutil.copytree(whole, tmp_path / "run")
    before, count = lines_of(whole), 0
    for number, line in enumerate(before):
        for place in places(line):
            edited(number, *place, value="other")(tmp_path / "run")
            assert list(Check(tmp_path / "run").run()), (number, place)
            write(tmp_path / "run", before)
            count += 1
    assert count > 150
    assert list(Check(tmp_path / "run").run()) == []


def places(entry: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys that lead to each entry."""
    inner = entry.items() if isinstance(entry, dict) else ()
    return [place for key, inside in inner for place in [(*where, key), *places(inside, (*where, key))]]
