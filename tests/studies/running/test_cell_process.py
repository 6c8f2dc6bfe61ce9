"""Processes of cells: told from commands started by hand by nothing but the time, and gone with the study."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from lit_fed.studies.running.cell_process import CellProcess
from lit_fed.studies.running.jobs import Slots
from tests.studies.support import CONFIGS
from tests.support import ROOT

pytestmark = pytest.mark.long

LONG = ["fit", "-c", str(CONFIGS / "quickstart.yaml"), "--trainer.max_rounds=5000", "--trainer.logger=false"]
ENV = Slots(jobs=1, threads=1).env(0)


def ended(process):
    deadline = time.monotonic() + 120
    while (status := process.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return status


def training(folder, locks=()):
    """Start a long cell and wait until it trains."""
    log = folder / "log.txt"
    process = CellProcess([*LONG, f"--trainer.default_root_dir={folder}"], log, ENV, locks)
    wait_for_round(log, process)
    return process


def wait_for_round(log, process):
    deadline = time.monotonic() + 120
    while not log.is_file() or "round 0" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid):
    deadline = time.monotonic() + 30
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.02)
        return False
    return True


def test_every_cell_has_its_own_status_and_log(tmp_path):
    for number, (words, expected) in enumerate({"fit --help": 0, "fat": 2, "fit": 2}.items()):
        log = tmp_path / f"{number}.txt"
        process, begun = CellProcess(words.split(), log, ENV), time.monotonic()
        assert ended(process) == expected
        assert 0 < process.cpu_seconds <= time.monotonic() - begun + 0.1, "one thread cannot take more"
        assert process.poll() == expected, "asked again it says the same"
    assert "usage" in (tmp_path / "0.txt").read_text()
    assert "lit-fed: error: " in (tmp_path / "1.txt").read_text()
    assert (tmp_path / "2.txt").read_text().count("\n") == 1


def test_a_cell_finds_all_modules_of_lit_fed_imported(tmp_path):
    ours = "{name for name in sys.modules if name.startswith('lit_fed')}"
    code = f"""
import sys, lit_fed.studies.running.warm
from lit_fed.command.cli import main
warm = {ours}
main(sys.argv[1:])
print("imported:", *sorted({ours} - warm))"""
    short = [*LONG[:-2], "--trainer.max_rounds=1", f"--trainer.default_root_dir={tmp_path}"]
    out = subprocess.run([sys.executable, "-c", code, *short], cwd=ROOT, check=True, capture_output=True, text=True)
    assert out.stdout.splitlines()[-1] == "imported:"


def test_a_cell_reads_its_command_with_the_parsers_that_are_there(tmp_path):
    code = """
import sys, lit_fed.studies.running.warm
from lit_fed.command.cli import main
from lit_fed.parsing import Parser
made, begin = [], Parser.__init__
Parser.__init__ = lambda self, *args, **kwargs: (made.append(self), begin(self, *args, **kwargs))[1]
main(sys.argv[1:])
print("made:", len(made))"""
    short = [*LONG[:-2], "--trainer.max_rounds=1", f"--trainer.default_root_dir={tmp_path}"]
    out = subprocess.run([sys.executable, "-c", code, *short], cwd=ROOT, check=True, capture_output=True, text=True)
    assert out.stdout.splitlines()[-1] == "made: 0"


def test_a_cell_leads_a_group_of_its_own_which_signals_reach(tmp_path):
    process = training(tmp_path / "interrupted")
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    process.stop(signal.SIGINT)
    assert ended(process) == 130, "as Ctrl-C ends an ordinary run"
    assert "interrupted in round" in (tmp_path / "interrupted" / "log.txt").read_text()
    other = training(tmp_path / "killed")
    other.stop(signal.SIGKILL)
    assert ended(other) == -signal.SIGKILL


def test_a_cell_is_known_to_have_ended_with_the_server_and_the_next_gets_another(tmp_path):
    process = training(tmp_path)
    os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # as the kernel may, out of memory
    assert ended(process) not in (0, None)
    assert gone(process.pid)
    following = CellProcess(["fit", "--help"], tmp_path / "next.txt", ENV)
    assert ended(following) == 0


def test_closed_it_leaves_nothing_running(tmp_path):
    process = training(tmp_path)
    process.close()
    assert gone(process.pid)
    process.close()


def test_a_cell_holds_the_locks_and_is_gone_with_a_killed_study(tmp_path):
    program = f"""
import sys, time
from lit_fed.studies.running.cell_process import CellProcess
from lit_fed.studies.running.jobs import Slots, locked
from pathlib import Path
if __name__ == "__main__":
    folder = Path({str(tmp_path)!r})
    with locked(folder) as lock:
        cell = CellProcess({LONG!r} + [f"--trainer.default_root_dir={{folder}}"], folder / "log.txt", {ENV!r}, [lock])
        print(cell.pid, flush=True)
        time.sleep(600)
"""
    script = tmp_path / "study.py"
    script.write_text(program)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    study = subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True)
    pid = int(study.stdout.readline())
    wait_for_round(tmp_path / "log.txt", study)
    held = {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    assert str(tmp_path / ".lock") in held
    study.kill()
    study.communicate()
    assert gone(pid)
