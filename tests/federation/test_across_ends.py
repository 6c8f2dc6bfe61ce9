"""The end of a federation: a run that is done, and SIGTERM, after which every file is whole."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lit_fed.callbacks import Callback
from lit_fed.engine.loop.checkpoint import read_checkpoint
from tests.federation.serving_support import free_address, until
from tests.support import ROOT, assert_same, run_cli, saved_weights, start_cli

pytestmark = pytest.mark.long

RUN = ["-c", str(ROOT / "configs/quickstart.yaml"), "--data.num_clients", "3", "--trainer.accelerator", "cpu"]
RUN += ["--trainer.participation", "FullParticipation", "--trainer.local_epochs", "1", "--trainer.max_rounds"]


class Stopping(Callback):
    """Sends its own process SIGTERM, and once more while it ends."""

    def __init__(self, hook: str, round_idx: int) -> None:
        self.hook, self.round_idx, self._now = hook, round_idx, 0

    def _stop(self, hook: str) -> None:
        if (hook, self._now) == (self.hook, self.round_idx):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)  # Python raises it in the next instructions

    def on_round_start(self, run: Any, round_idx: int, plan: Any) -> None:
        self._now = round_idx
        self._stop("round_start")

    def on_client_end(self, run: Any, update: Any) -> None:
        self._stop("client_end")

    def on_evaluation_start(self, run: Any, round_idx: int) -> None:
        self._stop("evaluation_start")

    def on_round_end(self, run: Any, record: Any) -> None:
        self._stop("round_end")


def stopping(hook: str, round_idx: int) -> list[str]:
    here = "tests.federation.test_across_ends.Stopping"
    return [
        "--trainer.callbacks+",
        here,
        "--trainer.callbacks.hook",
        hook,
        "--trainer.callbacks.round_idx",
        str(round_idx),
    ]


def node(folder: Path, address: str, rounds: int, clients: str, *words: str) -> subprocess.Popen[str]:
    state = f"node_{clients[1]}"
    return start_cli(
        "node", *RUN, str(rounds), "--server", address, "--client", clients, "--state_dir", state, *words, cwd=folder
    )


def ended(process: subprocess.Popen[str], seconds: float = 300.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


@contextmanager
def ends(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """Processes that are gone afterwards, whatever happened."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate(timeout=60)


def test_a_server_that_is_told_to_stop_anywhere_ends_with_0_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Twice SIGTERM while nodes gather, and in four places of four rounds; nodes until the run is done end with 0."""
    rounds, address, run = 5, free_address(), tmp_path / "lightning_logs/version_0"
    server = ["federate", *RUN, str(rounds), "--server", address]
    gathering = start_cli(*server, cwd=tmp_path)
    with ends(gathering):
        host, port = address.split(":")
        until(lambda: socket.socket().connect_ex((host, int(port))) == 0, 300.0)
        gathering.send_signal(signal.SIGTERM)
        gathering.send_signal(signal.SIGTERM)
        status, _, err = ended(gathering)
        assert (status, err) == (0, "")
    assert not run.exists()

    nodes = [node(tmp_path, address, rounds, clients, "--until_done", "true") for clients in ("[0,1]", "[2]")]
    with ends(*nodes):
        for done, hook in enumerate(["round_start", "client_end", "evaluation_start", "round_end"]):
            told = run_cli(*server, *stopping(hook, done), "--ckpt_path", "last", cwd=tmp_path)
            assert (told.returncode, told.stderr) == (0, ""), hook
            assert f"interrupted in round {done}; " in told.stdout
            assert not (run / ".writer").exists()
            assert read_checkpoint(run / "checkpoints/last.ckpt")["round_idx"] == done
        last = run_cli(*server, "--ckpt_path", "last", cwd=tmp_path)
        assert last.returncode == 0, last.stderr
        for process in nodes:
            status, out, err = ended(process)
            assert (status, err) == (0, "")
            assert f"INFO the run ended after round {rounds}; its model is saved in node_" in out
            assert not list(tmp_path.glob("node_*/.user"))
    whole = run_cli("fit", *RUN, str(rounds), cwd=tmp_path / "node_0")
    assert whole.returncode == 0
    assert_same(saved_weights(run), saved_weights(tmp_path / "node_0/lightning_logs/version_0"))


def test_a_run_that_is_done_is_no_outage_and_a_late_node_gets_its_end(tmp_path: Path) -> None:
    """A node that waits says so once; a server that is started again on the run waits for nobody who has its end."""
    address = free_address()
    server = ["federate", *RUN, "1", "--server", address]
    staying, leaving = node(tmp_path, address, 1, "[0,1]"), node(tmp_path, address, 1, "[2]")
    with ends(staying, leaving):
        first = run_cli(*server, cwd=tmp_path)
        assert first.returncode == 0, first.stderr
        leaving.send_signal(signal.SIGTERM)
        assert ended(leaving)[0] == 0
        (tmp_path / "node_2/states/last.pt").unlink()  # as if the server had been killed before it sent the end there
        time.sleep(8.0)  # an outage is a warning after 3 s
        staying.send_signal(signal.SIGTERM)
        status, out, _ = ended(staying)
        assert status == 0
        assert "WARNING" not in out
        assert out.count(f"INFO the run is done, and the server at {address} ended\n") == 1
    late = node(tmp_path, address, 1, "[2]", "--until_done", "true")
    with ends(late):
        again = run_cli(*server, "--ckpt_path", "last", "--gathering.wait_s", "20", cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        assert "the nodes of clients 0, 1 did not save the end of the run" in again.stdout
        assert ended(late)[0] == 0
    assert (tmp_path / "node_2/states/last.pt").is_file()


def test_a_second_server_of_a_run_is_refused_before_it_listens(tmp_path: Path) -> None:
    """Also while the first waits for nodes; nothing of the run changes."""
    first_at, second_at = free_address(), free_address()
    nodes = [node(tmp_path, first_at, 1, clients, "--until_done", "true") for clients in ("[0,1]", "[2]")]
    with ends(*nodes):
        assert run_cli("federate", *RUN, "1", "--server", first_at, cwd=tmp_path).returncode == 0
    first = start_cli("federate", *RUN, "2", "--server", first_at, "--ckpt_path", "last", cwd=tmp_path)
    run = tmp_path / "lightning_logs/version_0"
    with ends(first):
        until((run / ".writer").exists, 300.0)
        second = run_cli("federate", *RUN, "2", "--server", second_at, "--ckpt_path", "last", cwd=tmp_path)
        assert second.returncode == 2
        holder = rf"process {first.pid} on {re.escape(socket.gethostname())} since "
        assert re.fullmatch(rf"lit-fed: error: \S*version_0 is being written by {holder}.*\n", second.stderr)
        assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        assert ended(first)[0] == 0
    assert not (run / ".writer").exists()


def test_a_node_that_is_told_to_stop_at_work_ends_with_0_and_goes_on(tmp_path: Path) -> None:
    rounds, address = 4, free_address()
    server = ["federate", *RUN, str(rounds), "--server", address, "--ckpt_path", "last"]
    staying = node(tmp_path, address, rounds, "[0,1]", "--until_done", "true")
    stopped, running = node(tmp_path, address, rounds, "[2]"), start_cli(*server, cwd=tmp_path)
    with ends(staying, stopped, running):
        assert stopped.stdout is not None
        until(lambda: "round 2 of" in stopped.stdout.readline(), 400.0)
        stopped.send_signal(signal.SIGTERM)
        stopped.send_signal(signal.SIGTERM)
        status, _, err = ended(stopped)
        assert (status, err) == (0, "")
        assert not (tmp_path / "node_2/.user").exists()
        assert ended(running)[0] in (0, 1)  # 1: its client has failed; 0: it was between two rounds, and came back
        back = node(tmp_path, address, rounds, "[2]", "--until_done", "true")
        with ends(back):
            last = run_cli(*server, cwd=tmp_path)
            assert last.returncode == 0, last.stderr
            assert [ended(one)[0] for one in (staying, back)] == [0, 0]
    assert run_cli("fit", *RUN, str(rounds), cwd=tmp_path / "node_0").returncode == 0
    run = max((tmp_path / "lightning_logs").glob("version_*/checkpoints/last.ckpt"), key=os.path.getmtime).parents[1]
    assert_same(saved_weights(run), saved_weights(tmp_path / "node_0/lightning_logs/version_0"))
