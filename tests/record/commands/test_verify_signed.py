"""A federation over sockets with certificates, and the page's commands on what it leaves on its machines."""

from __future__ import annotations

import re
import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from lit_fed.command.cli import main
from lit_fed.federation.keys.node_keys import NodeKeys
from lit_fed.federation.keys.statements import SigningKey
from lit_fed.federation.node.node import Node
from lit_fed.federation.server.federate import federate
from tests.federation.serving_support import files, free_address, served, working
from tests.federation.support import small
from tests.support import ROOT, Points


def signing(keys: Path, name: str) -> SigningKey:
    return SigningKey.read(*(str(keys / file) for file in ("ca.crt", f"{name}.crt", f"{name}.key")), None)


def commands() -> list[list[str]]:
    """The block of the page that names a site's receipts."""
    page = (ROOT / "docs/record.md").read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "--receipts" in one]
    return [shlex.split(line)[1:] for line in block.splitlines()]


def test_the_pages_commands_on_a_run_over_sockets(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two nodes whose certificates the connection shows; each has one client, and three receipts."""
    make, address = small(data=Points, max_rounds=3, record=True), free_address()
    nodes = [
        Node(*make(tmp_path / str(place)), clients=[place], folder=tmp_path / f"{place}/states", say=lambda line: None,
             key=signing(keys, f"node_{place}"))
        for place in range(2)
    ]  # fmt: skip
    bound = NodeKeys(keys / "node_keys.yaml")
    made, *parts = make(tmp_path / "server")
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        grid = stack.enter_context(served(keys, address, node_keys=bound))
        for place, node in enumerate(nodes):
            stack.enter_context(working(node, address, files(keys, f"node_{place}")))  # type: ignore[arg-type]
        federate(grid, made, *parts, node_clients=bound, key=signing(keys, "server"))
    (made.log_dir / "config.yaml").write_text("", encoding="utf-8")  # as no command line has started it
    for place in range(2):
        here = tmp_path / f"look_{place}"
        shutil.copytree(made.log_dir, here / "lightning_logs/version_0")
        shutil.copytree(tmp_path / f"{place}/states", here / "state/states")
        for name in ("ca.crt", "server.crt", "server.key"):
            shutil.copy(keys / name, here)
        monkeypatch.chdir(here)
        capsys.readouterr()
        told = list[str]()
        for command in commands():
            main(command)
            told.append(capsys.readouterr().out)
        assert told[0].splitlines()[1] == "signed      6 statements of nodes"
        assert told[1].splitlines()[1:] == [
            "signed      6 statements of nodes", "whole       3 receipts in state/states/receipts.jsonl",
        ]  # fmt: skip
        assert told[2] == "whole       3 receipts in state/states/receipts.jsonl\n"
        assert told[4].startswith("signed      card.md by CN=server\n")
