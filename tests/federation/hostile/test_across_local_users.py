"""Another user of a node's machine finds nothing to connect to, and nothing to read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.federation.hostile.support import listening
from tests.federation.serving_support import free_address, of_node, served, until
from tests.support import ROOT

NOBODY = 65534


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_finds_nothing_on_a_node(keys: Path, tmp_path: Path) -> None:
    """A node at work listens nowhere, starts no process, and what it keeps is its user's alone."""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/tmp") and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o005)
    address, state, security = free_address(), tmp_path / "state", of_node(keys)
    words = [sys.executable, str(ROOT / "cli.py"), "node", "-c", str(ROOT / "configs/quickstart.yaml"), "--client", "0"]
    words += ["--server", address, "--ca", str(security.ca), "--certificate", str(security.certificate)]
    words += ["--key", str(security.key), "--state_dir", str(state)]
    with served(keys, address) as grid, open(tmp_path / "log", "wb") as log:
        node = subprocess.Popen(words, stdout=log, stderr=log, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
        try:
            until(grid.nodes, 300)
            assert listening(node.pid) == set()
            assert Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text() == ""
            for place in (state, f"/proc/{node.pid}/fd"):
                seen = subprocess.run(
                    ["/bin/ls", "-R", str(place)], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True,
                    text=True, check=False, cwd="/",
                )  # fmt: skip
                assert "Permission denied" in seen.stderr
                assert seen.stdout in ("", f"{place}:\n")
            second = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)
            assert second.returncode == 2
            assert re.fullmatch(
                rf"lit-fed: error: --state_dir .*state is used by process {node.pid} on .* since .*; stop that "
                r"process, or name another folder\n", second.stderr,
            )  # fmt: skip
            for path in state.rglob("*"):
                assert not path.stat().st_mode & 0o077, path
        finally:
            node.send_signal(signal.SIGTERM)
            assert node.wait(30) == 0
        assert until(lambda: not grid.nodes())
    assert "connected to the server at" in (tmp_path / "log").read_text()
