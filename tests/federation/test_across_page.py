"""What deployment.md, hospitals.md and operators_day.md say is done here as it stands there; promises have tests."""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, assert_same, saved_weights

PAGE = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
SITES = {"north": 0, "south": 1, "west": 2}
STARTS = re.compile(r"^lit-fed (node|federate) ", re.MULTILINE)  # ends that work until they are ended


def blocks(text: str, language: str = "sh") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Every call of ours, in words."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip().startswith("lit-fed ")]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def shell(block: str, folder: Path, environment: Mapping[str, str]) -> str:
    """What a block prints, done as it stands."""
    done = subprocess.run(
        ["bash", "-ec", block], cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def at_work(block: str, folder: Path, environment: Mapping[str, str], log: Path) -> Iterator[None]:
    """A node, until it is told to end, as a service manager would tell it."""
    with open(log, "wb") as file:
        words = ["bash", "-ec", STARTS.sub(r"exec lit-fed \1 ", block)]
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert status == 0, log.read_text()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """That of a shell which finds the program."""
    (tmp_path / "bin").mkdir()
    for name, words in {"lit-fed": f'"{sys.executable}" "{ROOT / "cli.py"}"', "python": f'"{sys.executable}"'}.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        program.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.long
def test_the_page_alone_leads_from_nothing_to_a_federation_of_three_sites(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    page = PAGE.replace("9092", str(free_port()))
    (described,) = (block for block in blocks(page, "yaml") if block.startswith("# federation.yaml\n"))
    (tmp_path / "federation.yaml").write_text(described)
    steps = blocks(page)
    starts = [place for place, block in enumerate(steps) if STARTS.search(block)]
    first, last = starts[0], starts[-1] + 1
    assert len(starts) == last - first == 4  # a server, and three nodes
    for block in steps[:first]:
        shell(block, tmp_path, environment)
    split = commands(steps[0])[0]
    shell(shlex.join(["lit-fed", "fit", *split[2 : split.index("--output")]]), tmp_path, environment)

    told = {tuple(command) for block in steps[first:last] for command in commands(block)}
    assert (
        "on_client_failure: skip" in (tmp_path / "federation/server/config.yaml").read_text()
    )  # no site ends it for all
    readmes = [*(tmp_path / "federation").rglob("README.md")]
    assert len(readmes) == 4  # one an end, with the folder of its data in it
    written = {tuple(command) for path in readmes for command in commands(path.read_text()) if command[1] != "split"}
    assert told <= written

    server, *nodes = steps[first:last]
    assert "lit-fed federate" in server
    with ends(nodes, tmp_path, environment):
        shell(server, tmp_path, environment)
    runs = [tmp_path / "lightning_logs" / "version_0", tmp_path / "federation/server/lightning_logs/version_0"]
    assert_same(*(saved_weights(run) for run in runs))
    for block in steps[last:]:
        shell(block, tmp_path, environment)
    assert (tmp_path / "federation/sites/north/predictions.csv").is_file()


@pytest.mark.long
def test_the_page_of_hospitals_leads_from_files_to_a_table_and_a_private_federation(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    pytest.importorskip("dp_accounting")
    page = (ROOT / "docs/hospitals.md").read_text(encoding="utf-8").replace("9092", str(free_port()))
    for block in [*blocks(page, "python"), *blocks(page, "yaml")]:
        (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block, encoding="utf-8")
    steps, shown = blocks(page), blocks(page, "text")
    starts = [place for place, block in enumerate(steps) if STARTS.search(block)]
    assert starts == [*range(len(steps) - 4, len(steps))]  # a server, and three nodes
    said = "\n".join(shell(block, tmp_path, environment) for block in steps[: starts[0]])
    for line in (shown[0] + shown[1]).splitlines():  # the files and the noisy statistics, to the digit
        assert line in said.splitlines(), line
    for label, mean in re.findall(r"│ (\S.*?) +│ ([\d.]+) ±", shown[2]):
        (ours,) = re.findall(rf"│ {re.escape(label)} +│ +([\d.]+) ±", said)
        assert float(ours) == pytest.approx(float(mean), abs=1), label

    server, *nodes = steps[starts[0] :]
    with ends(nodes, tmp_path, environment):
        told = shell(server, tmp_path, environment)
    run = tmp_path / "federation/server/lightning_logs/version_0"
    rounds = (run / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert len(rounds) == 1 + 20
    claims = re.findall(
        r"^\| (\d) \| ([\d.]+) \| 0.0001 \|", (run / "privacy.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [client for client, _ in claims] == ["0", "1", "2"]
    assert all(3.9 < float(epsilon) <= 4 for _, epsilon in claims)
    (line,) = (line for line in shown[3].splitlines() if line.startswith("privacy "))
    assert line in told.splitlines()
    keys = [(tmp_path / "federation/sites" / site / f"run.key.{client}").read_bytes() for site, client in SITES.items()]
    assert len({*keys}) == 3


class End:
    """An end in a terminal of its own, where somebody answers ``y`` to what it asks."""

    def __init__(self, block: str, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.keyboard, terminal = pty.openpty()
        os.write(self.keyboard, b"y\n")
        words = ["bash", "-ec", STARTS.sub(r"exec lit-fed \1 ", block)]
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                words, cwd=folder, env=environment, stdin=terminal, stdout=file, stderr=file
            )
        os.close(terminal)

    def __enter__(self) -> End:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.keyboard)

    def printed(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def stop(self) -> int:
        """End as a service manager ends it."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def until(self, pattern: str) -> str:
        """Wait for a line."""
        return wait_for(lambda: re.search(pattern, self.printed()), lambda: (pattern, self.printed()))[0]


def wait_for(what: Callable[[], Any], tell: Callable[[], object] = str) -> Any:
    end = time.monotonic() + 300
    while not (found := what()):
        assert time.monotonic() < end, tell()
        time.sleep(0.2)
    return found


def plain(line: str) -> str:
    """A line without times, hashes, sizes in bytes and paddings."""
    for pattern in (r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?", r"\b[0-9a-f]{16,}\b", r"\(\d\d+\)", r"round \d+"):
        line = re.sub(pattern, "*", line)
    return " ".join(line.split())


def same(shown: str, printed: str) -> None:
    lines = [plain(line) for line in printed.splitlines()]
    for line in shown.splitlines():
        assert any(one.startswith(plain(line)) for one in lines), (line, printed)


@pytest.fixture
def day(tmp_path: Path) -> tuple[list[str], list[str]]:
    """The commands of the page of a day, in order, and what it shows; the federation's file is written."""
    page = (ROOT / "docs/operators_day.md").read_text(encoding="utf-8")
    page = page.replace("9092", str(free_port())).replace("9093", str(free_port()))
    (described,) = blocks(page, "yaml")
    (tmp_path / "federation.yaml").write_text(described)
    return blocks(page), blocks(page, "text")


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_the_page_of_a_day_leads_from_keys_to_an_approval_a_stop_a_theft_a_change_and_an_officer(
    tmp_path: Path, environment: dict[str, str], day: tuple[list[str], list[str]]
) -> None:
    made, approving, server, look, revoke, change, logs, clean = day[0][:8]
    asked, looked, interrupted, revoked, lost, refused, table, cleaned = day[1][:8]

    def terminal(block: str, name: str) -> End:
        return stack.enter_context(End(block, tmp_path, environment, tmp_path / f"{name}.log"))

    def nodes(day: str) -> list[End]:
        """North's command is on the page, the others' are in their folders."""
        folders = {site: tmp_path / "federation/sites" / site for site in ("south", "west")}
        words = {site: shlex.join(commands((folder / "README.md").read_text())[0]) for site, folder in folders.items()}
        starts = {site: f"cd {folders[site]}\n{command}\n" for site, command in words.items()}
        return [terminal(block, site + day) for site, block in ({"north": approving} | starts).items()]

    with ExitStack() as stack:
        shell(made, tmp_path, environment)
        north, south, west = nodes("_morning")
        morning = terminal(server, "morning")
        said = shell(look, tmp_path, environment)
        same(looked, said)
        assert '"max_rounds": 200' in said
        same(asked.partition("…")[0], north.printed())
        assert morning.stop() == 0
        same(interrupted, morning.printed())
        resumed = terminal(server, "resumed")
        shell(look, tmp_path, environment)
        same(revoked, shell(revoke, tmp_path, environment))
        assert resumed.process.wait(400) == 0
        same(lost, resumed.printed())
        assert "continuing from lightning_logs/version_0/checkpoints/last.ckpt with round " in resumed.printed()
        assert re.search(r"^round 199 \| .* \| 2 clients ", resumed.printed(), re.MULTILINE)
        assert "it rejects this node: its key is revoked" in west.printed()
        assert [north.stop(), south.stop()] == [0, 0]
        west.stop()  # it may have ended by itself, two minutes after the theft

        shell(change, tmp_path, environment)
        unasked = terminal(approving.replace(" --approve", ""), "unasked")
        assert unasked.process.wait(100) == 2
        assert unasked.printed() == refused
        north, south, west = nodes("_evening")
        evening = terminal(server.replace(" --ckpt_path last", ""), "evening")
        assert evening.process.wait(300) == 0
        assert re.search(r"^round 2 \| .* \| 3 clients ", evening.printed(), re.MULTILINE)
        assert "  changed     trainer.max_rounds: 200 → 3\n" in north.printed()
        same(table, shell(logs, tmp_path, environment))
        north.until("the run ended after round 3; its model is saved")
        assert [north.stop(), south.stop(), west.stop()] == [0, 0, 0]
        listing, removal = clean.splitlines()
        said = shell(listing, tmp_path, environment)
        (old,) = re.findall(r"^([0-9a-f]{16}) .*:\d\d$", said, re.MULTILINE)
        same(cleaned, said + shell(re.sub(r"[0-9a-f]{16}$", old, removal), tmp_path, environment))
        assert old not in shell(listing, tmp_path, environment)


@pytest.mark.long
def test_the_page_of_a_day_leads_at_night_to_runs_that_an_operator_submits_and_stops_from_elsewhere(
    tmp_path: Path, environment: dict[str, str], day: tuple[list[str], list[str]]
) -> None:
    made, *_, change, _, _ = day[0][:8]
    sent, approval, standing, queue, submitted, by_node, stopped, barred, by_anna, log = day[0][8:]
    queued, node_refused, anna_refused, noted = day[1][8:]

    def terminal(block: str, name: str) -> End:
        return stack.enter_context(End(block, tmp_path, environment, tmp_path / f"{name}.log"))

    with ExitStack() as stack:
        for block in (made, change, sent):
            shell(block, tmp_path, environment)
        at_night = []
        for site, position in SITES.items():
            approved, stands = (
                block.replace("sites/north", f"sites/{site}").replace('"[0]"', f'"[{position}]"')
                for block in (approval, standing)
            )
            approver = terminal(approved, f"{site}_approval")
            assert approver.process.wait(200) == 0, approver.printed()
            at_night.append(terminal(stands, f"{site}_night"))
        doorman = terminal(queue, "queue")
        doorman.until("waiting for runs in queue")
        same(queued, shell(submitted, tmp_path, environment))
        stranger = terminal(by_node, "by_node")
        assert stranger.process.wait(200) == 2
        assert stranger.printed().endswith(node_refused)  # it may have waited between two runs
        first = tmp_path / "federation/server/queue/0001-study"
        wait_for(lambda: [*first.glob("lightning_logs/version_0/checkpoints/last.ckpt")])
        shell(stopped, tmp_path, environment)
        doorman.until("run 0001-study is stopped")
        assert saved_weights(first / "lightning_logs/version_0")
        shell(barred, tmp_path, environment)
        left = terminal(by_anna, "by_anna")
        assert left.process.wait(200) == 2
        assert left.printed().endswith(anna_refused)
        same(noted, shell(log, tmp_path, environment))
        assert [doorman.stop(), *(node.stop() for node in at_night)] == [0, 0, 0, 0]


@contextmanager
def ends(nodes: list[str], folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Nodes at work."""
    if not nodes:
        yield
        return
    log = folder / f"node_{len(nodes)}.log"
    with at_work(nodes[0], folder, environment, log), ends(nodes[1:], folder, environment):
        yield


def test_every_promise_names_a_test_that_there_is() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    promises = [row for row in rows if len(row) == 2 and row[0].strip() not in ("promise", "---")]
    assert len(promises) > 15
    for promise, shown in promises:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown)
        assert named, promise
        for file, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (file, test)
