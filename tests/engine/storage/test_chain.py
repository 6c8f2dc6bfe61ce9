"""A chain of lines: each line's hash is in the next one, and whatever was changed, cut or moved is named."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from lit_fed.engine.storage.chain import Chain, ChainReading, files_of
from lit_fed.errors import CheckpointError
from tests.support import ROOT


def written(path: Path, lines: int = 6, start: int = 0, **kwargs: int) -> Chain:
    chain = Chain(path, **kwargs)
    for number in range(start, start + lines):
        chain.append({"number": number, "text": "a line"})
    return chain


def numbers(path: Path) -> list[int]:
    return [content["number"] for _, content in ChainReading(path)]


def faults(path: Path) -> list[str]:
    return ChainReading(path).to_the_end().faults


def test_a_line_holds_the_hash_of_the_bytes_of_the_line_before(tmp_path: Path) -> None:
    """As `sha256sum` has it, of the line and its newline."""
    written(tmp_path / "log.jsonl", 3)
    lines = (tmp_path / "log.jsonl").read_bytes().splitlines(keepends=True)
    assert json.loads(lines[0])["previous"] == "0" * 64
    assert [json.loads(line)["previous"] for line in lines[1:]] == [sha256(line).hexdigest() for line in lines[:2]]
    assert lines[1] == b'{"number":1,"previous":"%s","text":"a line"}\n' % sha256(lines[0]).hexdigest().encode()
    assert ChainReading(tmp_path / "log.jsonl").to_the_end().last == sha256(lines[2]).hexdigest()
    assert stat.S_IMODE((tmp_path / "log.jsonl").stat().st_mode) == 0o600


def changed(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], lines[2].replace(b'"number":2', b'"number":7'), *lines[3:]]


def removed(lines: list[bytes]) -> list[bytes]:
    return lines[:2] + lines[3:]


def reordered(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], lines[3], lines[2], *lines[4:]]


def repeated(lines: list[bytes]) -> list[bytes]:
    return lines[:3] + lines[2:]


def begun_later(lines: list[bytes]) -> list[bytes]:
    return lines[2:]


def spoilt(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], b"nothing\n", *lines[3:]]


def added(lines: list[bytes]) -> list[bytes]:
    line = json.dumps({"number": 9, "previous": json.loads(lines[3])["previous"]}).encode() + b"\n"
    return [*lines[:3], line, *lines[3:]]


def called_torn(lines: list[bytes]) -> list[bytes]:
    """A line is exchanged for half of it, as a kill would leave it; the next one does not name it."""
    return [*lines[:2], lines[2][:20] + b"\n", *lines[3:]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (changed, ["log.jsonl, line 4 does not follow log.jsonl, line 3"]),
        (removed, ["log.jsonl, line 3 does not follow log.jsonl, line 2"]),
        (reordered, [f"log.jsonl, line {one} does not follow log.jsonl, line {one - 1}" for one in (3, 4, 5)]),
        (repeated, ["log.jsonl, line 4 does not follow log.jsonl, line 3"]),
        (begun_later, ["the lines before log.jsonl, line 1 were removed, and not by rotation"]),
        (spoilt, ["log.jsonl, line 4 does not follow log.jsonl, line 3"]),
        (added, ["log.jsonl, line 5 does not follow log.jsonl, line 4"]),
        (called_torn, ["log.jsonl, line 4 does not follow log.jsonl, line 3"]),
    ],
)
def test_what_was_changed_is_named_by_its_file_and_line(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], told: list[str]
) -> None:
    path = tmp_path / "log.jsonl"
    written(path)
    assert faults(path) == []
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    assert faults(path) == told


def test_every_changed_byte_but_those_of_the_last_line_is_found(tmp_path: Path) -> None:
    """Without the newline before it, the last two lines are a torn one."""
    path = tmp_path / "log.jsonl"
    written(path, 4)
    whole = path.read_bytes()
    before_the_last = len(whole) - len(whole.splitlines(keepends=True)[-1])
    for place in range(before_the_last - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert faults(path), place


def test_a_signal_in_the_middle_of_a_line_breaks_no_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when SIGTERM arrives during the flush to disk, and the end of the process is then a line of its own."""
    path = tmp_path / "log.jsonl"
    chain, flush = written(path, 2), os.fsync

    def interrupted(descriptor: int) -> None:
        flush(descriptor)
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)  # the signal's exception arrives at the latest here

    monkeypatch.setattr(os, "fsync", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests ignore it, as under nohup
    try:
        with pytest.raises(KeyboardInterrupt):
            chain.append({"number": 2}, lasting=True)
    finally:
        signal.signal(signal.SIGINT, before)
    chain.append({"number": 3}, lasting=True)
    assert (numbers(path), faults(path)) == ([0, 1, 2, 3], [])


def test_a_whole_new_end_is_found_by_a_noted_hash_alone(tmp_path: Path) -> None:
    """What the chain cannot show: a writer's own new lines, and an end that is cut off."""
    path = tmp_path / "log.jsonl"
    written(path)
    noted, lines = ChainReading(path).to_the_end().last, path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    assert faults(path) == []
    assert noted not in dict(ChainReading(path))
    written(path, 3, start=3)  # the same contents give the same hashes
    assert noted in dict(ChainReading(path))
    path.write_bytes(b"".join(lines[:3]))
    written(path, 3, start=7)
    assert faults(path) == []
    assert noted not in dict(ChainReading(path))


# ---------------------------------------------------------------------- kills


@pytest.mark.parametrize("kept", [1, 5, 40, -2])
def test_a_torn_last_line_is_named_stays_and_the_chain_goes_on(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "log.jsonl"
    written(path, 3)
    *before, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(before) + last[:kept])
    reading = ChainReading(path).to_the_end()
    assert (reading.torn, reading.faults) == (["log.jsonl, line 3"], [])
    assert numbers(path) == [0, 1]
    chain = written(path, 2, start=5)
    assert chain.faults == []
    assert (b"".join(before) + last[:kept] + b"\n") == path.read_bytes()[: len(b"".join(before)) + len(last[:kept]) + 1]
    reading = ChainReading(path).to_the_end()
    assert (reading.torn, reading.faults, numbers(path)) == (["log.jsonl, line 3"], [], [0, 1, 5, 6])
    content = json.loads(path.read_bytes().splitlines()[3])
    assert content["torn"] == sha256(last[:kept] + b"\n").hexdigest()
    path.write_bytes(path.read_bytes().replace(last[:kept] + b"\n", b"x\n"))  # also of a torn line a change is found
    assert faults(path) == ["log.jsonl, line 4 does not follow log.jsonl, line 3"]


def test_a_last_line_without_its_newline_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    written(path, 3)
    path.write_bytes(path.read_bytes()[:-1])
    assert (ChainReading(path).to_the_end().torn, numbers(path)) == ([], [0, 1, 2])
    written(path, 1, start=3)
    assert (faults(path), numbers(path)) == ([], [0, 1, 2, 3])


def test_lines_that_are_torn_one_after_the_other_are_named(tmp_path: Path) -> None:
    """Also one that is torn while it names another, and one that only lacks its newline there."""
    path = tmp_path / "log.jsonl"
    generator = random.Random(5)
    written(path, 3)
    for turn in range(40):
        size = path.stat().st_size
        written(path, 1, start=100 + turn)
        os.truncate(path, generator.randint(size, path.stat().st_size))
        assert faults(path) == []
    written(path, 1, start=200)
    assert faults(path) == []
    assert numbers(path)[:3] == [0, 1, 2]
    assert numbers(path)[-1] == 200


_WRITER = """
import sys
from pathlib import Path
from lit_fed.engine.storage.chain import Chain
chain = Chain(Path(sys.argv[1]), most_bytes=4000, most_files=3)
number = 0
while True:
    chain.append({"number": number, "text": "x" * (number % 300)}, lasting=number % 7 == 0)
    number += 1
"""


def test_a_writer_that_is_killed_at_any_time_leaves_a_whole_chain(tmp_path: Path) -> None:
    path, generator = tmp_path / "log.jsonl", random.Random(3)
    for _ in range(12):
        process = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], cwd=ROOT)
        while not path.exists():
            time.sleep(0.01)
        time.sleep(generator.uniform(0.2, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert faults(path) == []
    assert len(files_of(path)) in (3, 4, 5)  # a kill may come before the oldest file is deleted


_FULL = """
import resource, sys
from pathlib import Path
from lit_fed.engine.storage.chain import Chain
from lit_fed.errors import CheckpointError
chain = Chain(Path(sys.argv[1]))
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
chain.append({"number": 0})
resource.setrlimit(resource.RLIMIT_FSIZE, (120, most))
try:
    chain.append({"number": 1})
except CheckpointError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
chain.append({"number": 2})
"""


def test_a_full_disk_is_one_line_and_the_chain_goes_on_after_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    told = subprocess.run(
        [sys.executable, "-c", _FULL, str(path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout == f"cannot write {path}: [Errno 27] File too large\n"
    assert (numbers(path), faults(path), ChainReading(path).to_the_end().torn) == ([0, 2], [], ["log.jsonl, line 2"])


# ---------------------------------------------------------------------- several files


def test_a_full_file_is_put_aside_and_the_chain_goes_on_in_the_next(tmp_path: Path) -> None:
    """A line has some 110 bytes, so that a file of 300 is full after three."""
    path = tmp_path / "log.jsonl"
    written(path, 9, most_bytes=300)
    assert [file.name for file in files_of(path)] == ["log.1.jsonl", "log.2.jsonl", "log.jsonl"]
    assert (numbers(path), faults(path)) == (list(range(9)), [])
    last = (tmp_path / "log.1.jsonl").read_bytes().splitlines(keepends=True)[-1]
    first = (tmp_path / "log.2.jsonl").read_bytes().splitlines()[0]
    assert json.loads(first)["previous"] == sha256(last).hexdigest()


def test_files_that_rotation_deletes_are_not_missed_and_others_are(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    written(path, 20, most_bytes=300, most_files=3)
    assert [file.name for file in files_of(path)] == [*(f"log.{one}.jsonl" for one in (4, 5, 6)), "log.jsonl"]
    assert (numbers(path), faults(path)) == (list(range(9, 20)), [])
    assert "forgotten" in json.loads(path.read_bytes().splitlines()[0])
    (tmp_path / "log.4.jsonl").unlink()
    assert faults(path) == ["the lines before log.5.jsonl, line 1 were removed, and not by rotation"]


def swap(folder: Path) -> None:
    first, second = folder / "log.1.jsonl", folder / "log.2.jsonl"
    texts = first.read_bytes(), second.read_bytes()
    first.write_bytes(texts[1])
    second.write_bytes(texts[0])


def swap_lines(folder: Path) -> None:
    one, other = ((folder / f"log.{number}.jsonl").read_bytes().splitlines(keepends=True) for number in (1, 2))
    one[1], other[1] = other[1], one[1]
    (folder / "log.1.jsonl").write_bytes(b"".join(one))
    (folder / "log.2.jsonl").write_bytes(b"".join(other))


def cut(folder: Path) -> None:
    lines = (folder / "log.1.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "log.1.jsonl").write_bytes(b"".join(lines[:-1]))


def drop(folder: Path) -> None:
    (folder / "log.2.jsonl").unlink()


def copy(folder: Path) -> None:
    (folder / "log.3.jsonl").write_bytes((folder / "log.2.jsonl").read_bytes())


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (swap, "the lines before log.1.jsonl, line 1 were removed, and not by rotation"),
        (swap_lines, "log.1.jsonl, line 2 does not follow log.1.jsonl, line 1"),
        (cut, "log.2.jsonl, line 1 does not follow log.1.jsonl, line 2"),
        (drop, "log.jsonl, line 1 does not follow log.1.jsonl, line 3"),
        (copy, "log.3.jsonl, line 1 does not follow log.2.jsonl, line 3"),
    ],
)
def test_files_that_were_changed_or_exchanged_are_named(
    tmp_path: Path, change: Callable[[Path], None], first: str
) -> None:
    path = tmp_path / "log.jsonl"
    written(path, 9, most_bytes=300)
    change(tmp_path)
    assert faults(path)[0] == first


def test_other_files_of_the_folder_are_none_of_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for name in ("log.jsonl.1", "1.jsonl", "log.x.jsonl", "mylog.1.jsonl", "log.1.jsonl.gz"):
        (tmp_path / name).write_text("nothing\n")
    written(path, 9, most_bytes=300)
    assert (numbers(path), faults(path)) == (list(range(9)), [])


def test_what_is_changed_under_a_writer_is_found(tmp_path: Path) -> None:
    """Also in the last line: the writer knows what it wrote."""
    path = tmp_path / "log.jsonl"
    chain = written(path, 3)
    path.write_bytes(path.read_bytes().replace(b'"number":2', b'"number":5'))
    chain.append({"number": 3})
    assert faults(path) == ["log.jsonl, line 4 does not follow log.jsonl, line 3"]
    assert Chain(path).faults == ["log.jsonl, line 4 does not follow log.jsonl, line 3"]


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "none" / "log.jsonl")
    with pytest.raises(CheckpointError, match=r"cannot write .*log\.jsonl: .*No such file or directory"):
        chain.append({"number": 0})
