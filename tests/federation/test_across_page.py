"""What docs/deployment.md and docs/hospitals.md say is done here as it stands there; promises have tests."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

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
