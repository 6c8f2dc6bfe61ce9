"""Runs that end in the middle, as a user sees it: one line on the terminal, whatever ended them."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lit_fed import errors
from lit_fed.command.endings import exit_reported, witness
from lit_fed.data import DatasetModule, Datasets
from lit_fed.engine.loop.checkpoint import read_checkpoint
from tests.support import ROOT, run_cli, start_cli

pytestmark = pytest.mark.long

QUICK = ["fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--trainer.max_rounds", "3"]
QUICK += ["--trainer.participation", "FullParticipation", "--trainer.local_epochs", "1", "--trainer.accelerator", "cpu"]
ENDING = ["--algorithm", "tests.support.Ending", "--algorithm.how"]
LOST = "process 0 of 2 lost the others: one was stopped, killed, as for memory, or ended by a client's code"


def test_a_process_that_can_say_nothing_is_spoken_for(tmp_path: Path) -> None:
    """Of one that was killed, `tests/engine/test_across_resume.py` shows it."""
    done = run_cli(*QUICK, *ENDING, "_exit", cwd=tmp_path)
    assert done.returncode == 0
    told = (
        r"lit-fed: error: process \d+ ended without a message while client 7 worked in round 1: it was killed, as for "
    )
    assert re.fullmatch(rf"{told}memory, it crashed, .* os\._exit; continue with --ckpt_path last\n", done.stderr)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_one_of_two_processes_is_ended(tmp_path: Path, how: str) -> None:
    done = run_cli(*QUICK, *ENDING, how, "--trainer.devices", "2", cwd=tmp_path)
    assert done.returncode == 1  # a scheduler may start it again, which it must not after a mistake in options
    assert done.stderr == f"lit-fed: error: {LOST}; continue with --ckpt_path last\n"


class Pictures(Dataset[Any]):
    """Slow to read."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return torch.zeros(1, 8, 8), index % 10


class SlowPictures(DatasetModule):
    num_classes = 10
    input_shape = (1, 8, 8)

    def build_datasets(self) -> Datasets:
        labels = np.arange(2000) % 10
        return Datasets(Pictures(), labels, Pictures(), labels)


def test_ctrl_c_with_data_workers(tmp_path: Path) -> None:
    """The terminal sends it to all processes."""
    data = ["--data", "tests.command.test_endings.SlowPictures", "--data.num_workers", "2"]
    args = [*QUICK, *data, "--data.num_clients", "2", "--data.max_test_samples", "100", "--trainer.max_rounds", "99"]
    process = start_cli(*args, cwd=tmp_path, start_new_session=True)
    log = tmp_path / "lightning_logs/version_0/metrics.csv"
    while process.poll() is None and not (log.is_file() and len(log.read_text().splitlines()) > 1):
        time.sleep(0.02)
    time.sleep(0.3)  # into the next client's batches
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == ""
    assert re.search(r"\ninterrupted in round \d+; continue with --ckpt_path lightning_logs/version_0/\S+\n$", out)


def test_sigterm_ends_a_run_in_good_order(tmp_path: Path) -> None:
    """Twice, as by an impatient scheduler; a job that was stopped is not done, so the status is a shell's 128 + 15."""
    process = start_cli(*QUICK, "--trainer.max_rounds", "999", cwd=tmp_path)
    run = tmp_path / "lightning_logs/version_0"
    log = run / "metrics.csv"
    while process.poll() is None and not (log.is_file() and len(log.read_text().splitlines()) > 1):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (143, "")
    line = re.search(r"\ninterrupted in round (\d+); continue with --ckpt_path lightning_logs/version_0/\S+\n$", out)
    assert line is not None
    assert not (run / ".writer").exists()
    done = read_checkpoint(run / "checkpoints/last.ckpt")["round_idx"]
    assert done - int(line[1]) in (0, 1)  # 1: between a round's checkpoint and the next round


def test_a_second_signal_is_for_a_while_part_of_the_first_and_nohup_stays() -> None:
    program = (
        "import os, signal, sys, time\nfrom lit_fed.command.endings import Terminated, ending_by_signal\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "try:\n"
        "    with ending_by_signal():\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "        try:\n"
        "            os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)\n"
        "        finally:\n"
        "            os.kill(os.getpid(), signal.SIGTERM); print('cleaned')\n"
        "except Terminated as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM); print(stop.args[0])\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, text=True, capture_output=True, timeout=90)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cleaned\n15\n", "")


def test_a_full_disk_under_the_event_file(tmp_path: Path) -> None:
    done = run_cli(*QUICK, "--trainer.callbacks", "[tests.support.SmallDisk]", cwd=tmp_path)
    assert done.returncode == 2
    file = r"lightning_logs/version_0/FedAvg-Digits/events\.out\.tfevents\.\S+"
    told = rf"lit-fed: error: cannot write {file}: File too large\n"
    assert re.fullmatch(told, done.stderr)
    assert read_checkpoint(tmp_path / "lightning_logs/version_0/checkpoints/last.ckpt")["round_idx"] == 1


# ---------------------------------------------------------------------- the witness


def spoken_for(program: str) -> str:
    """What is said of a small program that has a witness."""
    lines = "import os, signal, sys, time\nfrom lit_fed.command.endings import witness\nwith witness() as tell:\n"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", lines + program], env=env, text=True, capture_output=True, timeout=90)
    assert done.stdout == ""
    return done.stderr


def test_the_witness_says_nothing_of_an_end_in_good_order() -> None:
    said = spoken_for("    tell('client 1 worked'); raise ValueError('of its own')")
    assert said.splitlines()[-1] == "ValueError: of its own"
    assert "without a message" not in said


def test_the_witness_outlives_the_signals_of_a_terminal() -> None:
    assert "without a message:" in spoken_for(
        "    time.sleep(1); signal.signal(15, 0); os.killpg(0, 15) if os.setsid() is None else 0"
    )


def test_a_child_that_outlives_the_process_keeps_nobody_waiting() -> None:
    begun = time.monotonic()
    said = spoken_for(
        "    tell('client 1 worked')\n"
        "    if os.fork() == 0:\n"
        "        os.closerange(1, 3); time.sleep(100); os._exit(0)\n"
        "    os._exit(0)"
    )
    assert "ended without a message while client 1 worked: " in said
    assert time.monotonic() - begun < 55


def test_a_witness_that_was_killed_is_not_missed() -> None:
    with witness() as tell:
        (child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        time.sleep(0.1)
        tell("client 1 worked")


def test_sys_exit_outside_of_clients_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    with pytest.raises(SystemExit), exit_reported():
        sys.exit(4)
    assert re.fullmatch(
        r"lit-fed: the run was ended by sys\.exit\(4\) in \S*test_endings\.py, line \d+\n", said.getvalue()
    )


def test_the_table_of_statuses_is_the_codes() -> None:
    """Errors have a status, and Ctrl-C ends the program with a number; 0 is Python's own."""
    text = (ROOT / "docs/get_started.md").read_text(encoding="utf-8")
    told = {int(status): row for status, row in re.findall(r"^\| (\d+) \|(.+)$", text, re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LitFedError)]
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "lit_fed").rglob("*.py"))
    exits = {int(status) for status in re.findall(r"(?:sys\.exit|os\._exit)\((\d+)\)", code)}
    assert told.keys() == {0} | {kind.status for kind in kinds} | exits
    assert set(re.findall(r"`(\w+Error|[A-Z]\w+)`", told[1])) == {kind.__name__ for kind in kinds if kind.status == 1}
