"""A federation of processes with certificates: the page's commands, on what a run leaves on its machines."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.federation.serving_support import free_address, until
from tests.federation.signing_support import made_keys
from tests.federation.test_across_ends import RUN, ended, ends
from tests.support import ROOT, run_cli, start_cli

pytestmark = pytest.mark.long


def commands() -> list[list[str]]:
    """The block of the page that names a site's receipts."""
    page = (ROOT / "docs/record.md").read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "--receipts" in one]
    return [shlex.split(line)[1:] for line in block.splitlines()]


def test_the_pages_commands_after_a_killed_node_and_a_stopped_server(tmp_path: Path) -> None:
    """Node 1 is killed and started again, the server is told to stop and resumed: no alarm, and all receipts."""
    made_keys(tmp_path / "federation")
    address, folder = free_address(), tmp_path / "federation"
    ca, server = folder / "authority/ca.crt", folder / "server"
    (server / "node_keys.yaml").write_text("keys/site_0.crt: [0]\nkeys/site_1.crt: [1]\nkeys/site_2.crt: [2]\n")
    tls = ["--ca", ca, "--server", address]
    own = [
        "--certificate",
        server / "server.crt",
        "--key",
        server / "server.key",
        "--node_keys",
        server / "node_keys.yaml",
    ]
    run = [*RUN, "4", "--trainer.record", "true", "--trainer.on_client_failure", "skip"]
    words = ["federate", *run, *map(str, [*tls, *own]), "--patience.return_s", "60", "--ckpt_path", "last"]

    def node(place: int) -> subprocess.Popen[str]:
        (home := tmp_path / f"site_{place}").mkdir(exist_ok=True)
        files = ["--certificate", server / f"keys/site_{place}.crt", "--key", folder / f"sites/site_{place}/node.key"]
        more = ["--client", f"[{place}]", "--state_dir", "state", "--until_done", "true"]
        return start_cli("node", *run, *map(str, [*tls, *files]), *more, cwd=home)

    nodes, record = [node(place) for place in range(3)], tmp_path / "lightning_logs/version_0/record.jsonl"
    first = start_cli(*words, cwd=tmp_path)
    with ends(first, *nodes):
        until(lambda: record.exists() and record.read_text().count('"server"') >= 1, 300.0)
        nodes[1].kill()
        nodes[1].communicate(timeout=60)
        first.send_signal(signal.SIGTERM)
        assert ended(first)[0] == 0
        nodes[1] = node(1)
        with ends(nodes[1]):
            last = run_cli(*words, cwd=tmp_path)
            assert (last.returncode, last.stderr) == (0, ""), last.stdout
            assert [ended(one)[0] for one in nodes] == [0, 0, 0]
    time.sleep(0.1)
    for place in range(3):
        here = tmp_path / f"look_{place}"
        shutil.copytree(tmp_path / "lightning_logs", here / "lightning_logs")
        shutil.copytree(tmp_path / f"site_{place}/state/states", here / "state/states")
        for path in (ca, server / "server.crt", server / "server.key"):
            shutil.copy(path, here)
        told = [run_cli(*one, cwd=here) for one in commands()]
        assert [done.returncode for done in told] == [0] * 5, [done.stdout + done.stderr for done in told]
        signed = re.search(r"signed      (\d+) statements of nodes\n", told[0].stdout)
        assert signed is not None
        assert int(signed[1]) >= 10  # of 4 rounds of 3 clients; node 1 may have failed once
        assert re.search(r"whole       [34] receipts in state/states/receipts.jsonl\n", told[1].stdout)
        assert told[2].stdout == told[1].stdout.splitlines(keepends=True)[-1]
        assert told[4].stdout.startswith("signed      card.md by CN=lit_fed server\n")
