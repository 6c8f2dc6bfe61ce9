"""One run, one writer: whoever comes second is told who was first, and the first one's run is as if nobody had come."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.callbacks import Callback
from lit_fed.errors import ConfigError
from tests.support import Threes, Wanderer, Wandering, assert_same, fit, rows, saved_weights, weights

FORK = multiprocessing.get_context("fork")


class Waiting(Callback):
    """Waits in round 1 until a file is there, with a child of its own as data workers are."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def on_round_start(self, run: Any, round_idx: int, plan: Any) -> None:
        if round_idx == 1:
            if (child := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            self.gate.with_suffix(".child").write_text(str(child))
            self.gate.with_suffix(".reached").touch()
            while not self.gate.exists():
                time.sleep(0.01)
            os.kill(child, signal.SIGKILL)


def federation(folder: Path, rounds: int, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return fit(folder, Wanderer(lr=0.05), Threes(3), Wandering(), max_rounds=rounds, **kwargs)


def writing(folder: Path, gate: Path, **kwargs: Any) -> Any:
    """Another process that is in the middle of a run."""
    kwargs |= {"callbacks": [Waiting(gate)]}
    process = FORK.Process(target=federation, args=(folder, 4), kwargs=kwargs)
    process.start()
    deadline = time.monotonic() + 60
    while not gate.with_suffix(".reached").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.is_alive()
    return process


@pytest.mark.parametrize("target", ["last", "folder"])
def test_a_second_writer_is_refused_by_name_and_the_first_is_not_disturbed(tmp_path: Path, target: str) -> None:
    gate, run = tmp_path / "gate", tmp_path / "lightning_logs" / "version_0"
    first = writing(tmp_path, gate)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"version_0 is being written by process \d+ on .* since 2") as caught:
        federation(tmp_path, 4, ckpt_path="last" if target == "last" else str(run))
    assert f"process {first.pid} on {socket.gethostname()}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    gate.touch()
    first.join(60)
    assert first.exitcode == 0
    whole = federation(tmp_path / "whole", 4)
    assert_same(saved_weights(run), weights(whole))
    assert [row["round"] for row in rows(run / "metrics.csv")] == list("0123")
    assert not (run / ".writer").exists()


def test_a_new_run_beside_one_under_way_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first = writing(tmp_path, gate)
    assert federation(tmp_path, 2).log_dir.name == "version_1"
    gate.touch()
    first.join(60)


@pytest.mark.long
def test_a_killed_writer_holds_nothing_nor_does_a_child_that_outlives_it(tmp_path: Path) -> None:
    first = writing(tmp_path, tmp_path / "gate")
    os.kill(first.pid, signal.SIGKILL)
    first.join(60)
    orphan = int((tmp_path / "gate.child").read_text())
    try:
        resumed = federation(tmp_path, 4, ckpt_path="last")
    finally:
        os.kill(orphan, signal.SIGKILL)
    assert resumed.run.start_round == 1
    assert_same(weights(resumed), weights(federation(tmp_path / "whole", 4)))


def test_an_error_gives_the_folder_back(tmp_path: Path) -> None:
    class Broken(Callback):
        def on_round_end(self, run: Any, record: Any) -> None:
            raise OSError("no space for a picture")

    with pytest.raises(OSError, match="no space"):
        federation(tmp_path, 2, callbacks=[Broken()])
    assert federation(tmp_path, 2, ckpt_path="last").run.start_round == 0


def test_two_trainers_of_one_process_are_two_writers(tmp_path: Path) -> None:
    class Resuming(Callback):
        def on_round_end(self, run: Any, record: Any) -> None:
            with pytest.raises(ConfigError, match=rf"is being written by process {os.getpid()} on"):
                federation(tmp_path, 2, ckpt_path=str(run.log_dir))

    federation(tmp_path, 1, callbacks=[Resuming()])


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    run = federation(tmp_path, 1).log_dir
    (run / ".lock").unlink()
    (run / ".lock").mkdir()  # a folder where the lock should be: also root cannot write there
    with pytest.raises(ConfigError, match=r"the run's folder .*version_0 cannot be written to: Is a directory"):
        federation(tmp_path, 2, ckpt_path="last")
