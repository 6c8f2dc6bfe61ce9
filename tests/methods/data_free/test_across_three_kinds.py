"""FedGen, HFedCKD, FedProto and FedTGP on three kinds of network: resumed == uninterrupted, 1 process == 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.methods.data_free.run_kinds import GENERATORS, METHODS, PROTOTYPES, run_kinds
from tests.methods.test_across_every_method import assert_same_run, trained
from tests.support import ROOT, rows

ROUNDS = 4
EACH = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("whole")
    return {method: run_kinds(method, folder, ROUNDS) for method in METHODS}


@EACH
def test_resumed_is_uninterrupted(method: str, whole: dict[str, Path], tmp_path: Path) -> None:
    early = trained(run_kinds(method, tmp_path, 2))
    resumed = run_kinds(method, tmp_path, ROUNDS)
    assert trained(resumed) - early, "no client appears late"
    assert_same_run(whole[method], resumed)


@pytest.mark.long
def test_two_processes_are_one(whole: dict[str, Path], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tests.methods.data_free.run_kinds", str(tmp_path), str(ROUNDS), "2", *METHODS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for method in METHODS:
        assert_same_run(whole[method], tmp_path / method / "lightning_logs" / "version_0")


@pytest.mark.parametrize("method", PROTOTYPES)
def test_prototypes_are_all_that_kinds_share(method: str, whole: dict[str, Path]) -> None:
    last = rows(whole[method] / "metrics.csv")[-1]
    assert not [name for name in last if name.startswith("global")]
    assert float(last["clients/acc_mean"]) > 0.2, "guessing gives 0.1"
    assert float(last["comm/uplink_bytes"]) == 4 * 4 * 10 * (64 + 1)  # clients, bytes, classes; features and a count


@pytest.mark.parametrize("method", GENERATORS)
def test_every_kind_has_a_global_model(method: str, whole: dict[str, Path]) -> None:
    last = rows(whole[method] / "metrics.csv")[-1]
    kinds = ("full", "half", "quarter") if method.endswith("widths") else ("cnn", "transformer", "mlp")
    assert all(last[f"global_{kind}/acc"] for kind in kinds)
