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
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fed.command.cli import main
from lit_fed.command.reading.config_files import SECTIONS
from lit_fed.engine.storage.chain import ChainReading
from lit_fed.errors import ConfigError
from lit_fed.federation.audit import NAME
from lit_fed.federation.messages.operating import QueueRequest
from lit_fed.federation.server.queue import RUN_KEYS, QueuedRun, act, runs, submit
from tests.support import ROOT

SERVER = """
import sys
from pathlib import Path
from contextlib import nullcontext
from lit_fed.command.endings import ending_by_signal
from lit_fed.federation.server.queue import work
from lit_fed.federation.transport.grid import MemoryGrid
program = "import sys, yaml; exec(yaml.safe_load(open(sys.argv[1]))['program'])"
with ending_by_signal():  # as the command line does
    command = lambda run: [sys.executable, "-c", program, run.folder / "config.yaml"]
    work(Path("queue"), command, lambda audit: nullcontext(MemoryGrid({})))
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
        hidden = re.compile(r"  [0-9a-f]{16}  \(local\)|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
        return [" ".join(hidden.sub("", line).split()) for line in capsys.readouterr().out.splitlines()]

    return lines


def program(text: str, name: str = "a") -> Path:
    path = Path(f"{name}.yaml")
    path.write_text(yaml.safe_dump({"program": text}))
    return path


def submitted(folder: Path, text: str, name: str = "a") -> QueuedRun:
    return submit(folder, QueueRequest("submit", name, program(text, name).read_bytes()))


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
        submitted(folder, "from pathlib import Path; Path('begun').touch(); import time; time.sleep(1000)", name)
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
    submitted(folder, text)
    server = serve()
    until(Path("one").exists)
    until(Path("one").read_text)
    submitted(folder, "", "b")
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
    submitted(folder, text + "file.flush()\nwhile not Path('go').exists(): time.sleep(0.05)")
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
    submitted(folder, text)
    alone = subprocess.run([sys.executable, "-c", text], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert alone.returncode == 0
    server = serve()
    until(lambda: runs(folder)[0].state[0] not in ("queued", "running"))
    server.send_signal(signal.SIGTERM)
    server.wait(30)
    assert listed() == ["0001-a failed see its log"]


def test_other_folders_are_no_runs_and_numbers_are_numbers(folder: Path) -> None:
    for name in ("notes-1", "12", "9999-old", "10000-new"):
        (folder / name).mkdir(parents=True)
    assert submitted(folder, "").folder.name == "10001-a"
    assert [run.folder.name for run in runs(folder)] == ["10001-a"]


def test_what_many_submit_at_once_is_queued_whole_under_numbers_of_its_own(folder: Path) -> None:
    threads = [threading.Thread(target=submitted, args=(folder, f"# {place}", f"r{place}")) for place in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.folder.name[:4] for run in runs(folder)] == [f"{number:04}" for number in range(1, 21)]
    found = {
        one.folder.name[5:]: yaml.safe_load((one.folder / "config.yaml").read_text())["program"] for one in runs(folder)
    }
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
        (["stop", "../a"], "the queue has no run '../a'; see lit-fed runs"),
        (["stop", "0001-a"], "run 0001-a is finished; stop a run that is queued or running"),
    ],
)
def test_mistakes_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    submitted(folder, "").put("finished")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"lit-fed: error: {line}\n"


# ---------------------------------------------------------------------- what an operator may ask, and what is noted


def asked(folder: Path, verb: Any, name: str = "", config: bytes = b"trainer: {}", by: str = "anna") -> list[str]:
    return act(folder, QueueRequest(verb, name, config), by)


def test_what_an_operator_submits_is_bounded_named_and_parsed_and_nothing_else_is_written(folder: Path) -> None:
    """A billion laughs has nine levels of nine aliases, 9^9 = 387 million values."""
    laughs = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9))
    refused = {
        ("study", b"trainer: {}\nnode_keys: /tmp/mine.yaml"): "has 'node_keys'; an operator's has only trainer, model",
        ("study", b"config: /etc/passwd"): "has 'config'; an operator's has only",
        ("study", b"server: 0.0.0.0:1"): "has 'server'; an operator's has only",
        ("study", b"trainer: [" * 10_000): "is not YAML with keys such as trainer and data; correct it",
        ("study", b"- trainer"): "is not YAML with keys",
        ("study", b"\xff\xfe"): "is not YAML with keys",
        ("study", b""): "is not YAML with keys",
        ("study", laughs.encode()): "is not YAML with keys",
        ("study", b"!!python/object/apply:os.system [touch pwned]"): "is not YAML with keys",
        ("study", b"#" * 1_000_001): "has more than 1,000,000 bytes; shorten it",
        ("../study", b"trainer: {}"): "'../study' cannot name a run; rename the file, such as study.yaml",
        ("/etc/study", b"trainer: {}"): "cannot name a run",
        (".ssh", b"trainer: {}"): "cannot name a run",
        ("a\nb", b"trainer: {}"): "cannot name a run",
        ("", b"trainer: {}"): "cannot name a run",
    }
    for (name, config), words in refused.items():
        with pytest.raises(ConfigError, match=re.escape(words)):
            asked(folder, "submit", name, config)
    assert [*Path().rglob("*")] == []
    assert asked(folder, "submit", "study")[0].startswith("0001-study is queued, with configuration ")
    assert asked(folder, "submit", "study")[0].startswith("0002-study is queued, with configuration ")  # is another run


def test_the_keys_of_an_operators_configuration_are_those_of_a_run_and_two_of_the_server() -> None:
    assert (*SECTIONS, "gathering", "patience") == RUN_KEYS


def test_any_operator_stops_any_run_once(folder: Path) -> None:
    asked(folder, "submit", "study", by="anna")
    for name in ("study", "../0001-study", "0002-study", ""):
        with pytest.raises(ConfigError, match="the queue has no run"):
            asked(folder, "stop", name)
    assert asked(folder, "stop", "0001-study", by="ben") == []
    with pytest.raises(ConfigError, match="run 0001-study is being stopped; stop a run that is queued or running"):
        asked(folder, "stop", "0001-study")
    assert (runs(folder)[0].folder / "stop").read_text() == "ben"


def test_the_log_of_the_queue_says_who_submitted_and_stopped_what(folder: Path) -> None:
    slow = yaml.safe_dump({"trainer": {}, "model": "x"}).encode()
    asked(folder, "submit", "study", slow, by="anna")
    submitted(folder, "import time; time.sleep(1000)")
    asked(folder, "submit", "other", slow, by="ben")
    asked(folder, "stop", "0001-study", by="ben")
    server = serve()
    until(lambda: runs(folder)[1].state[0] == "running")
    asked(folder, "stop", "0003-other", by="anna")
    until(lambda: runs(folder)[2].state[0] == "stopped")  # at once, while another run is at work
    assert runs(folder)[1].state[0] == "running"
    asked(folder, "stop", "0002-a", by="anna")
    until(lambda: runs(folder)[1].state[0] == "stopped")
    server.send_signal(signal.SIGTERM)
    server.wait(30)
    reading = ChainReading(folder / "audit" / NAME)
    lines = [line for _, line in reading if line["event"] in ("submitted", "stopped")]
    assert reading.faults == []
    assert [(line["event"], line["run"], line["by"]) for line in lines] == [
        ("submitted", "0001-study", "anna"), ("stopped", "0001-study", "ben"), ("submitted", "0002-a", "(local)"),
        ("submitted", "0003-other", "ben"), ("stopped", "0003-other", "anna"), ("stopped", "0002-a", "anna"),
    ]  # fmt: skip
    assert {line["config"] for line in lines if line["run"] != "0002-a"} == {sha256(slow).hexdigest()}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["runs", "--ca", "ca.crt"], "--ca is given without --server; correct one of them"),
        (
            ["runs", "--queue", "q", "--server", "127.0.0.1:1"],
            "--queue is given with --server; correct one of them",
        ),
        (
            ["submit", "a.yaml", "--server", "127.0.0.1:1"],
            f"the configuration has 'program'; an operator's has only {', '.join(RUN_KEYS)}",
        ),
        (
            ["runs", "--server", "192.0.2.7:1"],
            "--ca is missing, and 192.0.2.7:1 is not on this machine; see docs/deployment.md",
        ),
    ],
)
def test_mistakes_about_a_server_elsewhere_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    program("")
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"lit-fed: error: {line}\n"
