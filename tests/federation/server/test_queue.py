"""A queue's runs start one after the other, and each ends in a state of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_fed.command.cli import main
from lit_fed.federation.server.queue import runs, submit
from tests.support import ROOT

SERVER = """
import sys
from pathlib import Path
from lit_fed.command.endings import ending_by_signal
from lit_fed.federation.server.queue import work
with ending_by_signal():  # as the command line does
    work(Path("queue"), lambda run: [sys.executable, run.folder / "config.yaml"])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose queue's server runs "configurations" that are programs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "queue"


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    def lines() -> list[str]:
        capsys.readouterr()
        main(["runs"])
        hidden = re.compile(r"  [0-9a-f]{16}|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
        return [" ".join(hidden.sub("", line).split()) for line in capsys.readouterr().out.splitlines()]

    return lines


def program(text: str, name: str = "a") -> Path:
    path = Path(f"{name}.yaml")
    path.write_text(text)
    return path


def serve(stdout: int | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SERVER], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=stdout)


def until(done: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_runs_start_in_order_and_end_as_they_end(folder: Path, listed: Callable[[], list[str]]) -> None:
    noted = "from pathlib import Path; file = open('order', 'a'); file.write('{}'); file.close()"
    fails = "; import sys; print('lit-fed: error: no data', file=sys.stderr); sys.exit(2)"
    for name, more in {"a": "", "b-1": fails, "c": "", "d": "; raise SystemExit(1)"}.items():
        main(["submit", str(program(noted.format(name[0]) + more, name))])
    assert listed() == ["0001-a queued", "0002-b_1 queued", "0003-c queued", "0004-d queued"]
    server = serve()
    until(lambda: runs(folder)[-1].state[0] == "failed")
    server.send_signal(signal.SIGTERM)
    server.wait(30)
    assert listed() == ["0001-a finished", "0002-b_1 failed no data", "0003-c finished", "0004-d failed see its log"]
    assert Path("order").read_text() == "abcd"
    assert {path.stat().st_mode & 0o077 for path in folder.rglob("*")} == {0}


def test_a_run_is_stopped_before_it_starts_and_at_work(folder: Path, listed: Callable[[], list[str]]) -> None:
    for name in ("a", "b", "c"):
        submit(folder, program("from pathlib import Path; Path('begun').touch(); import time; time.sleep(1000)", name))
    main(["stop", "0002-b"])
    server = serve()
    until(Path("begun").exists)
    main(["stop", "0001-a"])
    until(lambda: runs(folder)[2].state[0] == "running")
    main(["stop", "0003-c"])
    until(lambda: runs(folder)[2].state[0] == "stopped")
    server.send_signal(signal.SIGTERM)
    server.wait(30)
    assert listed() == ["0001-a stopped", "0002-b stopped", "0003-c stopped"]


def test_a_server_that_ends_ends_its_run_which_the_next_one_resumes_first(folder: Path) -> None:
    text = "import os, time; from pathlib import Path; again = Path('one').exists()\n"
    text += "Path('one').write_text(str(os.getpid()))\nagain or time.sleep(1000)"
    submit(folder, program(text, "a"))
    server = serve()
    until(Path("one").exists)
    until(Path("one").read_text)
    submit(folder, program("", "b"))
    server.send_signal(signal.SIGTERM)
    server.wait(30)
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("one").read_text()), 0)
    assert [run.state[0] for run in runs(folder)] == ["running", "queued"]
    server = serve()
    until(lambda: runs(folder)[1].state[0] == "finished")
    server.send_signal(signal.SIGTERM)
    server.wait(30)
    assert [run.state[0] for run in runs(folder)] == ["finished", "finished"]


def test_a_run_that_outlives_a_killed_server_is_not_started_twice(folder: Path) -> None:
    text = "import os, time; from pathlib import Path\nfile = open('begun', 'a'); file.write(f'{os.getpid()} ')\n"
    submit(folder, program(text + "file.flush()\nwhile not Path('go').exists(): time.sleep(0.05)", "a"))
    begun = Path("begun")
    server = serve()
    until(lambda: begun.exists() and begun.read_text())
    server.kill()
    server.wait(30)
    server = serve(stdout=subprocess.PIPE)
    assert server.stdout is not None
    lines = [server.stdout.readline().decode() for _ in range(2)]
    assert "run 0001-a is still at work in a process of an earlier server; waiting for its end" in lines[1]
    assert len(begun.read_text().split()) == 1
    Path("go").touch()
    until(lambda: runs(folder)[0].state[0] == "finished")
    assert len(begun.read_text().split()) == 2  # which found the run done
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=30)


def test_a_run_that_somebody_else_ends_is_not_called_finished(folder: Path, listed: Callable[[], list[str]]) -> None:
    """By the command line of a service, whose status after SIGTERM is 0 elsewhere."""
    text = """\
import os, signal
from lit_fed.command import cli
cli._run = lambda words: os.kill(os.getpid(), signal.SIGTERM)
cli.main(["federate"])
"""
    submit(folder, program(text, "a"))
    alone = subprocess.run([sys.executable, "a.yaml"], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert alone.returncode == 0
    server = serve()
    until(lambda: runs(folder)[0].state[0] not in ("queued", "running"))
    server.send_signal(signal.SIGTERM)
    server.wait(30)
    assert listed() == ["0001-a failed see its log"]


def test_other_folders_are_no_runs_and_numbers_are_numbers(folder: Path) -> None:
    for name in ("notes-1", "12", "9999-old", "10000-new"):
        (folder / name).mkdir(parents=True)
    assert submit(folder, program("")).folder.name == "10001-a"
    assert [run.folder.name for run in runs(folder)] == ["10001-a"]


def test_what_many_submit_at_once_is_queued_whole_under_numbers_of_its_own(folder: Path) -> None:
    names = [program(f"# {place}", f"r{place}") for place in range(20)]
    threads = [threading.Thread(target=submit, args=(folder, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.folder.name[:4] for run in runs(folder)] == [f"{number:04}" for number in range(1, 21)]
    found = {run.folder.name[5:]: (run.folder / "config.yaml").read_text() for run in runs(folder)}
    assert found == {f"r{place}": f"# {place}" for place in range(20)}


def test_a_queue_has_one_server(folder: Path) -> None:
    server = serve()
    until((folder / ".user").exists)
    words, env = [sys.executable, "-c", SERVER], os.environ | {"PYTHONPATH": str(ROOT)}
    second = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert "--queue queue is used by process" in second.stderr
    server.send_signal(signal.SIGTERM)
    server.wait(30)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["submit"], "lit-fed submit needs a configuration file; name one"),
        (["submit", "none.yaml"], "lit-fed submit: none.yaml is not a file; correct the path"),
        (["stop"], "lit-fed stop needs a run; see lit-fed runs"),
        (["stop", "../a"], "--queue queue has no run '../a'; see lit-fed runs"),
        (["stop", "0001-a"], "run 0001-a is finished; stop a run that is queued or running"),
    ],
)
def test_mistakes_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    submit(folder, program("")).put("finished")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"lit-fed: error: {line}\n"
