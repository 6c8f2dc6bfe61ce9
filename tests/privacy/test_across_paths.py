"""A private run releases the same models over nodes, on two processes, and after a kill in any phase of a round."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from lit_fed.methods import Scaffold
from lit_fed.participation import PoissonParticipation
from tests.deployment.support import deploy, simulate, small
from tests.privacy.support import private
from tests.support import ROOT, Points, assert_same, rows, run_cli, saved_weights, weights

pytest.importorskip("dp_accounting")

RUN = ["fit", "-c", str(ROOT / "configs/quickstart.yaml"), "-c", str(ROOT / "configs/privacy/client_level.yaml")]
RUN += ["--trainer.max_rounds", "3", "--trainer.accelerator", "cpu", "--trainer.local_epochs", "1"]
RUN += ["--trainer.privacy.key_file", "run.key", "--trainer.evaluate_every", "1"]
KEY = '{"key": "' + "5a" * 32 + '"}\n'
HOOKS = ["on_round_start", "on_client_end", "on_evaluation_start", "on_round_end"]


def test_over_nodes_is_in_one_process(tmp_path: Path) -> None:
    def settings() -> dict[str, object]:
        return {**private(0.5, 1.0), "participation": PoissonParticipation(0.7)}

    make = small(data=lambda: Points(4), algorithm=Scaffold, max_rounds=3, **settings())
    simulated = simulate(make, tmp_path / "one")
    make = small(data=lambda: Points(4), algorithm=Scaffold, max_rounds=3, **settings())
    deployed = deploy(make, tmp_path / "grid", [[0, 1], [2, 3]])
    assert_same(weights(simulated), weights(deployed))
    assert simulated.metrics["privacy/epsilon"] == deployed.metrics["privacy/epsilon"]


def keyed(folder: Path) -> Path:
    folder.mkdir()
    (folder / "run.key").touch(0o600)
    (folder / "run.key").write_text(KEY)
    return folder


def outcome(folder: Path) -> tuple[list[str], list[str]]:
    """Every round's ε, and the releases that the key has recorded."""
    epsilons = [row["privacy/epsilon"] for row in rows(folder / "lightning_logs/version_0/metrics.csv")]
    return epsilons, (folder / "run.key").read_text().splitlines()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = keyed(tmp_path_factory.mktemp("whole") / "run")
    done = run_cli(*RUN, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
@pytest.mark.parametrize("hook", HOOKS)
def test_killed_in_any_phase_and_resumed_releases_the_same_models(hook: str, whole: Path, tmp_path: Path) -> None:
    folder = keyed(tmp_path / "run")
    killed = ["--trainer.callbacks", f"[{{class_path: tests.privacy.support.KilledAt, init_args: {{hook: {hook}}}}}]"]
    first = run_cli(*RUN, *killed, cwd=folder)
    assert first.returncode == -signal.SIGKILL
    again = run_cli(*RUN, *killed, "--ckpt_path", "last", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert_same(saved_weights(whole / "lightning_logs/version_0"), saved_weights(folder / "lightning_logs/version_0"))
    assert outcome(folder) == outcome(whole)


@pytest.mark.long
@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_two_processes_are_one(executor: str, tmp_path: Path) -> None:
    found = []
    for devices in ("1", "2"):
        folder = keyed(tmp_path / devices)
        done = run_cli(*RUN, "--trainer.executor", executor, "--trainer.devices", devices, cwd=folder)
        assert done.returncode == 0, done.stderr
        found.append(folder)
    one, two = found
    assert_same(saved_weights(one / "lightning_logs/version_0"), saved_weights(two / "lightning_logs/version_0"))
    assert outcome(one) == outcome(two)
