"""Workers: cells begin in forked processes, and are told from commands started by hand by nothing but the time."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest

from lit_fed.studies.jobs import Slots
from lit_fed.studies.worker import Worker
from tests.studies.support import CONFIGS

LONG = ["fit", "-c", str(CONFIGS / "quickstart.yaml"), "--trainer.max_rounds=5000", "--trainer.logger=false"]


@pytest.fixture(scope="module")
def worker():
    """One for all tests: what one cell does must not matter to the next."""
    worker = Worker(Slots(jobs=1, threads=1).env(0), locks=[])
    yield worker
    worker.close()


def ended(worker):
    deadline = time.monotonic() + 120
    while (status := worker.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return status


def training(worker, folder):
    """Start a long cell and wait until it trains; its process."""
    log = folder / "log.txt"
    worker.start([*LONG, f"--trainer.default_root_dir={folder}"], log)
    deadline = time.monotonic() + 120
    while not log.is_file() or "round 0" not in log.read_text():
        assert worker.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return worker._cell


def gone(pid):
    deadline = time.monotonic() + 30
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.02)
        return False
    return True


def test_every_cell_has_its_own_status_and_log(worker, tmp_path):
    for number, (words, expected) in enumerate({"fit --help": 0, "fat": 2, "fit": 2}.items()):
        log = tmp_path / f"{number}.txt"
        worker.start(words.split(), log)
        assert ended(worker) == expected
        assert worker.poll() == expected, "asked again it says the same"
    assert "usage" in (tmp_path / "0.txt").read_text()
    assert "lit-fed: error: " in (tmp_path / "1.txt").read_text()
    assert (tmp_path / "2.txt").read_text().count("\n") == 1


def test_a_cell_leads_a_group_of_its_own_which_signals_reach(worker, tmp_path):
    pid = training(worker, tmp_path / "interrupted")
    assert os.getpgid(pid) == pid != os.getpgid(0)
    worker.stop(signal.SIGINT)
    assert ended(worker) == 130, "as Ctrl-C ends an ordinary run"
    assert "interrupted in round" in (tmp_path / "interrupted" / "log.txt").read_text()
    other = training(worker, tmp_path / "killed")
    assert other != pid
    worker.stop(signal.SIGKILL)
    assert ended(worker) == -signal.SIGKILL


def test_a_cell_ends_with_its_worker_and_the_next_gets_another(worker, tmp_path):
    pid = training(worker, tmp_path)
    os.kill(worker._process.pid, signal.SIGKILL)  # as the kernel may, out of memory
    assert ended(worker) == -signal.SIGKILL
    assert gone(pid)
    worker.start(["fit", "--help"], tmp_path / "next.txt")
    assert ended(worker) == 0


def test_closed_it_leaves_nothing_running(worker, tmp_path):
    pid = training(worker, tmp_path)
    worker.close()
    assert gone(pid)
    worker.close()
