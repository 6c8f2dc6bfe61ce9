"""Dockerfile and compose.yaml, as far as they can be proven without Docker: parsed, and their commands run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.federation.serving_support import free_address
from tests.federation.test_across_page import blocks, commands, ends
from tests.support import ROOT, assert_same, run_cli, saved_weights

PAGE = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
STEPS = [tuple(line.split(" ", 1)) for line in DOCKERFILE.splitlines() if line and line[0] != "#"]
FOLDERS = {"server": "server", "north": "sites/north", "south": "sites/south", "west": "sites/west"}


def test_the_image_runs_lit_fed_as_a_user_without_rights() -> None:
    assert {word for word, _ in STEPS} <= {
        "FROM",
        "ARG",
        "COPY",
        "RUN",
        "USER",
        "WORKDIR",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    last = dict(STEPS)
    assert [rest.split()[0] for word, rest in STEPS if word == "FROM"] == ["python:3.13-slim"] * 2
    assert (last["USER"], json.loads(last["ENTRYPOINT"]), json.loads(last["CMD"])) == (
        "lit_fed", ["lit-fed"], ["--help"],
    )  # fmt: skip
    assert "useradd --create-home --uid 1000 lit_fed" in last["RUN"]
    assert "://" not in DOCKERFILE.replace("http://127.0.0.1:", "")  # no index by name


def test_the_image_gets_the_packages_sources_and_no_key() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert lines[1] == "*"
    let_in = {line[1:] for line in lines if line.startswith("!")}
    # what pyproject.toml says a wheel is made of, and the constraints
    assert let_in == {"pyproject.toml", "README.md", "LICENSE", "lit_fed", "examples", "configs", "constraints.txt"}
    assert all((ROOT / name).exists() for name in let_in)


@pytest.mark.parametrize("served", [False, True])
def test_the_health_check_asks_the_status_page_where_there_is_one(served: bool) -> None:
    words = json.loads(dict(STEPS)["HEALTHCHECK"].partition(" CMD ")[2])
    assert words[0] == "python"
    environment = {**os.environ, **({"STATUS_PORT": free_address().rpartition(":")[2]} if served else {})}
    done = subprocess.run([sys.executable, *words[1:]], env=environment, capture_output=True)
    assert done.returncode == (1 if served else 0)  # nobody answers at the port


def test_a_container_has_its_own_folder_few_rights_and_one_port_open_at_the_server() -> None:
    assert SERVICES.keys() == FOLDERS.keys()
    for name, service in SERVICES.items():
        assert service["volumes"] == [f"./federation/{FOLDERS[name]}:/federation"]
        assert (service["cap_drop"], service["read_only"]) == (["ALL"], True)
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service.keys() & {"privileged", "network_mode", "cap_add", "pid", "devices"}
        assert service.get("ports", []) == (["9092:9092"] if name == "server" else [])


@pytest.mark.long
def test_the_commands_of_the_containers_run_a_federation(tmp_path: Path) -> None:
    """Without Docker: in the folders that are mounted, with a port of this machine in place of the server's name."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "lit-fed"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "cli.py"}" "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    (described,) = (block for block in blocks(PAGE, "yaml") if block.startswith("# federation.yaml\n"))
    described, count = re.subn(r"names: \[[^]]*\]", "names: [server, 127.0.0.1]", described)
    assert count == 1
    (tmp_path / "federation.yaml").write_text(described)
    split = commands(blocks(PAGE)[0])[0][1:]
    fit = ["fit", *split[1 : split.index("--output")]]
    for words in (split, fit, ["provision", "-c", "federation.yaml", "--output", "federation"]):
        done = run_cli(*[word.replace("configs/", f"{ROOT}/configs/") for word in words], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for end, data in {"server": "server", "north": "client_0", "south": "client_1", "west": "client_2"}.items():
        home = tmp_path / "federation" / FOLDERS[end]
        (home / data).symlink_to(tmp_path / "parts" / data)
        ours = shlex.split(SERVICES[end]["command"])
        written = [command[1:] for command in commands((home / "README.md").read_text())]
        added = ["--status_port", SERVICES["server"]["environment"]["STATUS_PORT"]] if end == "server" else []
        assert ours in [[*command, *added] for command in written]

    address, status = free_address(), free_address().rpartition(":")[2]

    def block(end: str) -> str:
        told = SERVICES[end]["command"].replace("server:9092", address)
        told = told.replace("0.0.0.0:9092", address).replace("9093", status)
        return f"cd federation/{FOLDERS[end]}\nlit-fed {told}\n"

    with ends([block(name) for name in ("north", "south", "west")], tmp_path, environment):
        words = ["bash", "-ec", block("server")]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    runs = [tmp_path / "lightning_logs" / "version_0", tmp_path / "federation/server/lightning_logs/version_0"]
    assert_same(*(saved_weights(run) for run in runs))
