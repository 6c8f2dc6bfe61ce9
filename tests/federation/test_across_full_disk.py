"""A disk that fills up under a server or a node: one clear line, nothing is lost, and the run resumes to the same bits.

The disk is a tmpfs of its own in a mount namespace of the test's process; ENOSPC is the kernel's.
"""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lit_fed.callbacks import Callback
from lit_fed.errors import CheckpointError, ClientFailure
from lit_fed.methods import Scaffold
from tests.federation.support import Parts, deploy, simulate
from tests.federation.test_across_faults import HOMES, wanderers
from tests.support import ROOT, assert_same, weights


class Filling(Callback):
    """Fills a disk to its last byte at the end of the second of five rounds."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk

    def on_round_end(self, run: Any, record: Any) -> None:
        if record.round_idx == 1:
            with suppress(OSError), open(self.disk / "filler", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))


def mount(disk: Path) -> None:
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)


def fill_and_resume(end: str, folder: Path) -> None:
    disk = folder / {"server": "lightning_logs", "node": "node_1/states"}[end]
    mount(disk)
    make = wanderers(Scaffold, max_rounds=5)

    def filling(where: Path) -> Parts:
        made = make(where)
        if where == folder:
            made.trainer.callbacks.append(Filling(disk))
        return made

    try:
        deploy(filling, folder, HOMES, own={"say": print})
    except (CheckpointError, ClientFailure) as error:
        print(f"{type(error).__name__}: {error}")
    else:
        sys.exit("a full disk was not noticed")
    (disk / "filler").unlink()
    assert_same(weights(deploy(make, folder, HOMES, "last")), weights(simulate(make, folder / "simulated")))
    print("the same weights")


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "told"),
    [
        (
            "server",
            r"CheckpointError: cannot write .*: \[Errno 28\] No space left on device; the previous last.ckpt is ",
        ),
        (
            "node",
            r"ClientFailure: client \d failed in round 2: CheckpointError in .*: No space left on device \(error 1 in",
        ),
    ],
)
def test_a_full_disk_is_said_in_a_line_and_the_run_resumes_to_the_same_bits(
    tmp_path: Path, end: str, told: str
) -> None:
    apart = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine has no mount namespaces")
    done = subprocess.run(
        [*apart, sys.executable, "-m", __name__, end, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if re.match(told, line)], done.stdout
    assert lines[-1] == "the same weights"
    assert "Traceback" not in done.stderr


if __name__ == "__main__":
    fill_and_resume(sys.argv[1], Path(sys.argv[2]))
