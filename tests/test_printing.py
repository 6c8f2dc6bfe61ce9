"""Nothing ends because what it prints cannot be printed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_fed.printing import unfailing
from tests.support import ROOT

_SCRIPT = """
import sys
from lit_fed.printing import open_standard, unfailing
open_standard()
with unfailing() as lost:
    opened = open("own", "w")
    for number in range(20_000):
        print(f"{number} 8×8", file=opened if number == 3 else None)
        print("é", file=sys.stderr)
    opened.write("done")
    opened.close()
open("lost", "w").write(",".join(str(error.errno) for error in lost))
"""


def ran(folder: Path, shell: str, **env: str) -> tuple[int, str]:
    """The exit status, and what both streams said, of the script in a shell's pipeline."""
    words = f'set -o pipefail; "{sys.executable}" -c "$SCRIPT" {shell}'
    given = os.environ | {"SCRIPT": _SCRIPT, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"} | env
    done = subprocess.run(["bash", "-c", words], cwd=folder, env=given, capture_output=True, timeout=60)
    return done.returncode, (done.stdout + done.stderr).decode("utf-8")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("shell", "lost"),
    [
        ("2>/dev/null | head -1", ""),
        ("2>&1 >/dev/null | head -1", ""),
        (">/dev/full", "28"),  # ENOSPC
        (">/dev/full 2>/dev/full", "28"),
        ("2>/dev/full >/dev/null", ""),
        (">&-", ""),
        ("2>&-", ""),
        ("<&- >&- 2>&-", ""),
    ],
)
def test_what_cannot_be_printed_ends_nothing(shell: str, lost: str, unbuffered: str, tmp_path: Path) -> None:
    status, said = ran(tmp_path, shell, PYTHONUNBUFFERED=unbuffered)
    assert status == 0, said
    assert "Error" not in said
    assert (tmp_path / "lost").read_text() == lost
    # A file of one's own does not get the number of a closed stream, and what is printed to that.
    assert (tmp_path / "own").read_text(encoding="utf-8") == "3 8×8\ndone"


def test_characters_that_an_encoding_lacks_are_numbers(tmp_path: Path) -> None:
    _, said = ran(tmp_path, "2>/dev/null", PYTHONIOENCODING="ascii")
    assert said.splitlines()[0] == r"0 8\xd78"
    _, said = ran(tmp_path, "2>/dev/null", PYTHONIOENCODING="ascii:replace")
    assert said.splitlines()[0] == "0 8?8"
    _, said = ran(tmp_path, "2>/dev/null")
    assert said.splitlines()[0] == "0 8×8"


def test_streams_are_put_back_and_those_without_a_file_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with open(tmp_path / "x", "w", encoding="utf-8") as file:
        text = io.StringIO()
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", text)
        print("before")
        with unfailing(), unfailing():
            stream: Any = sys.stdout
            assert stream is not file
            assert sys.stderr is text
            print("within")
        assert sys.stdout is file
        print("after")
    assert (tmp_path / "x").read_text() == "before\nwithin\nafter\n"


def test_a_file_with_a_name_that_is_no_text_is_refused_in_a_line(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "lit_fed", "fit", "-c", os.fsdecode(b"caf\xe9.yaml")]
    done = subprocess.run(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (done.returncode, done.stderr) == (
        2,
        b"lit-fed: error: 'caf\\udce9.yaml' is not text in UTF-8; rename the file\n",
    )


def test_a_run_that_nobody_reads_is_trained_to_its_end(tmp_path: Path) -> None:
    """In a folder whose name is not in the locale's encoding, for a reader who leaves, and without standard error."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = f"""set -o pipefail; "{sys.executable}" -m lit_fed fit -c "{ROOT}/configs/quickstart.yaml" \\
        --trainer.max_rounds 3 --trainer.default_root_dir é 2>&- | head -1"""
    done = subprocess.run(["bash", "-c", words], cwd=tmp_path, env=env, capture_output=True, timeout=120)
    assert done.returncode == 0, done
    assert done.stdout.startswith(b"round 0 | global/acc 0."), "the first line of its log"
    run = tmp_path / "é" / "lightning_logs" / "version_0"
    assert len((run / "metrics.csv").read_text(encoding="utf-8").splitlines()) == 1 + 3
    assert (run / "checkpoints" / "best.ckpt").is_file()
    assert list(run.rglob("events.*"))


def test_a_run_from_python_is_trained_to_its_end_too(tmp_path: Path) -> None:
    script = (
        "from tests.support import fit\nfrom pathlib import Path\nimport sys\n"
        "made = fit(Path('.'), max_rounds=3, enable_progress_bar=True)\n"
        "Path('done').write_text(str(made.run.next_round))\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    read, write = os.pipe()
    os.close(read)  # nobody ever reads
    words = [sys.executable, "-c", script]
    subprocess.run(words, cwd=tmp_path, env=env, stdout=write, stderr=subprocess.PIPE, timeout=120)
    os.close(write)
    assert (tmp_path / "done").read_text() == "3"
