"""Progress of long work on a terminal, in a pipe, and within a run's display."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lit_fed import tracking
from lit_fed.callbacks import Callback, Progress, RoundRecord, Run
from lit_fed.data import Digits
from lit_fed.methods import FedAvg
from lit_fed.tasks import Classifier
from lit_fed.tracking import tracked
from tests.support import ROOT, Points, fit, trainer

DATA = ["--data", "Digits", "--data.num_clients", "6"]
SLOW = """
import time
from lit_fed.tracking import tracked
for _ in tracked(range(4), "writing clients", 4):
    time.sleep(0.2)
"""


def seen_on_a_terminal(words: list[str], cwd: Path) -> tuple[int, str]:
    """Run a program on a terminal of its own, and return its exit status and what the terminal got."""
    ours, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, stdin=its, stdout=its, stderr=its, cwd=cwd, env=environment, close_fds=True
    ) as process:
        os.close(its)
        parts = []
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # its last end is closed
                break
            if not part:
                break
            parts.append(part)
    os.close(ours)
    return process.returncode, b"".join(parts).decode()


def test_work_has_a_bar_on_a_terminal_and_nothing_in_a_pipe(tmp_path: Path) -> None:
    code, text = seen_on_a_terminal([sys.executable, "-c", SLOW], tmp_path)
    assert code == 0
    assert "writing clients" in text
    assert "%" in text
    assert "\x1b[2K" in text, "it is erased at the end"
    done = subprocess.run(
        [sys.executable, "-c", SLOW], capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
    )
    assert (done.stdout, done.stderr) == (b"", b"")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["statistics", *DATA, "--output", "out.json"], "statistics of clients"),
        (["split", *DATA, "--model", "Classifier", "--algorithm", "FedAvg", "--output", "out"], "writing clients"),
        (["provision", "-c", "federation.yaml", "--output", "out"], "keys and certificates"),
    ],
)
@pytest.mark.long
def test_commands_show_their_work_on_a_terminal_alone(words: list[str], what: str, tmp_path: Path) -> None:
    sites = "\n".join(f"  site_{client}: {{clients: [{client}]}}" for client in range(6))
    (tmp_path / "run.yaml").write_text(
        "data: {class_path: Digits, init_args: {num_clients: 6}}\n"
        "model: {class_path: Classifier, init_args: {network: mlp}}\nalgorithm: {class_path: FedAvg}\n"
    )
    (tmp_path / "federation.yaml").write_text(
        f"server: {{names: [localhost], port: 9092}}\nconfig: run.yaml\nsites:\n{sites}\n"
    )
    command = [sys.executable, "-m", "lit_fed", *words]
    for folder in ("terminal", "pipe"):
        (tmp_path / folder).mkdir()
    code, text = seen_on_a_terminal(["sh", "-c", 'cp ../*.yaml .; exec "$@"', "sh", *command], tmp_path / "terminal")
    assert code == 0, text
    assert what in text
    for path in tmp_path.glob("*.yaml"):
        (tmp_path / "pipe" / path.name).write_bytes(path.read_bytes())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path / "pipe", capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert what not in done.stdout + done.stderr


def test_long_work_has_a_line_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 1000, 4))  # seconds: an item takes four
    monkeypatch.setattr(tracking.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(tracking, "displays", [])
    assert list(tracked("abcdef", "reading", 6)) == list("abcdef")
    said = capsys.readouterr()
    assert said.out == ""
    # Begun at 0 s, items at 4, 8, 12 s: more than 10 s. A line reads the clock once more, so that the next are at
    # 20, 24 and 28 s, and that at 28 s is 12 s after the line of 16 s.
    assert said.err.splitlines() == ["reading: 3 of 6", "reading: 6 of 6"]


def test_an_error_in_the_work_passes() -> None:
    def work() -> Any:
        yield 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(tracked(work(), "reading"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Look(Callback):
    """Keeps what the display shows when a round ends."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seen: list[str] = []

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        console = Console(file=io.StringIO(), width=100)
        with console.capture() as captured:
            console.print(self.progress._render())
        self.seen.append(captured.get())


def test_a_run_shows_its_evaluation_in_its_own_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    progress = Progress()
    progress.console = Console(file=io.StringIO(), width=100, force_terminal=True)
    look = Look(progress)
    fit(tmp_path, data=(data := Points()), max_rounds=2, enable_progress_bar=True, callbacks=[look, progress])
    count = data.num_clients
    assert [f"evaluating: {count} of {count}" in shown for shown in look.seen] == [True, True]
    assert "evaluating" not in terminal.getvalue(), "no second bar"
    assert tracking.displays == []


def test_a_trainer_without_progress_bar_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    made = trainer(tmp_path, enable_progress_bar=False)
    task, data = Classifier("logistic", num_classes=10, input_shape=(1, 8, 8)), Digits(num_clients=3)
    method = FedAvg()
    made.fit(task, data, method)
    made.test(task, data, method)
    assert terminal.getvalue() == ""
    made = trainer(tmp_path, enable_progress_bar=True, max_rounds=1)
    made.test(task, Digits(num_clients=3), FedAvg(), ckpt_path="last")
    assert "reading and dividing the data" in terminal.getvalue()
    assert "evaluating" in terminal.getvalue()
