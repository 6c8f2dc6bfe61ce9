"""What docs/deployment.md says is done here as it stands there; what SECURITY.md promises has a test."""

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


@pytest.mark.long
def test_the_page_alone_leads_from_nothing_to_a_federation_of_three_sites(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "lit-fed"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "cli.py"}" "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
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
