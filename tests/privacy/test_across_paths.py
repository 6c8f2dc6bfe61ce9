"""A private run releases the same models over nodes, on two processes, and after a kill in any phase of a round."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from lit_fed.federation.messages.wire import decode
from lit_fed.federation.node.node import Node
from lit_fed.methods import Scaffold
from lit_fed.participation import PoissonParticipation
from tests.federation.support import Make, Parts, deploy, simulate, small
from tests.privacy.support import PLACES, private, uniform
from tests.support import ROOT, Points, assert_same, rows, run_cli, saved_weights, start_cli, weights

pytest.importorskip("dp_accounting")

RUN = ["fit", "-c", str(ROOT / "configs/quickstart.yaml"), "-c", str(ROOT / "configs/privacy/client_level.yaml")]
RUN += ["--trainer.max_rounds", "3", "--trainer.accelerator", "cpu", "--trainer.local_epochs", "1"]
SIMULATED = [*RUN, "--trainer.evaluate_every", "1"]
RUN = [*SIMULATED, "--trainer.privacy.key_file", "run.key"]
W = "network.weight"
KEY = '{"key": "' + "5a" * 32 + '"}\n'


def test_over_nodes_is_in_one_process(tmp_path: Path) -> None:
    def settings() -> dict[str, object]:
        return {**private(0.5, 1.0), "participation": PoissonParticipation(0.7)}

    make = small(data=lambda: Points(4), algorithm=Scaffold, max_rounds=3, **settings())
    simulated = simulate(make, tmp_path / "one")
    make = small(data=lambda: Points(4), algorithm=Scaffold, max_rounds=3, **settings())
    deployed = deploy(make, tmp_path / "grid", [[0, 1], [2, 3]])
    assert_same(weights(simulated), weights(deployed))
    assert simulated.metrics["privacy/epsilon"] == deployed.metrics["privacy/epsilon"]


def test_over_nodes_the_key_is_the_servers(tmp_path: Path) -> None:
    def settings(folder: Path) -> dict[str, object]:
        return {**private(0.5, 1.0, key_file=str(folder / "run.key")), "participation": PoissonParticipation(0.7)}

    found = []
    for name in ("one", "grid"):
        folder = keyed(tmp_path / name)

        def make(place: Path, folder: Path = folder) -> Parts:  # every end has the setting; a node has no such file
            own = folder if place == folder else place / "no"
            return small(data=lambda: Points(4), algorithm=Scaffold, max_rounds=3, **settings(own))(place)

        made = simulate(make, folder) if name == "one" else deploy(make, folder, [[0, 1], [2, 3]])
        found.append((weights(made), (folder / "run.key").read_text()))
        assert not [path for path in folder.rglob("run.key") if path.parent != folder]
    (one, key), (grid, same) = found
    assert_same(one, grid)
    assert key == same


def test_a_node_clips_before_it_sends_and_the_server_bounds_one_that_does_not(tmp_path: Path) -> None:
    # From w = 0 at rate ½ client 0 moves by (1, 0) and client 1 by (0, 2); with C = ½ both move by ½.
    def make(norm: float) -> Make:
        return small(algorithm=uniform, max_rounds=1, **private(norm))

    made = {}
    for name, norm in (("honest", 0.5), ("lying", 100.0)):
        sent: list[float] = []

        def watched(nodes: list[Node], sent: list[float] = sent) -> dict[int, Callable[[bytes], bytes]]:
            def handle(blob: bytes, node: Node) -> bytes:
                answer = node.handle(blob)
                sent.extend(float(one.norm()) for group in decode(answer).tensors.values() for one in group.values())
                return answer

            return {place + 1: partial(handle, node=node) for place, node in enumerate(nodes)}

        def either(folder: Path, norm: float = norm) -> Parts:
            return make(norm if "node" in folder.name else 0.5)(folder)

        made[name] = deploy(either, tmp_path / name, [[0], [1]], handlers=watched)
        assert sorted(sent) == ([0.5, 0.5] if name == "honest" else [1.0, 2.0])
        assert weights(made[name])[W].tolist() == [[0.25, 0.25]]


def keyed(folder: Path) -> Path:
    folder.mkdir()
    (folder / "run.key").touch(0o600)
    (folder / "run.key").write_text(KEY)
    return folder


def outcome(folder: Path) -> tuple[list[str], list[str]]:
    """Every round's ε, and the releases that the key has recorded."""
    epsilons = [row["privacy/epsilon"] for row in rows(folder / "lightning_logs/version_0/metrics.csv")]
    return epsilons, (folder / "run.key").read_text().splitlines()


@pytest.mark.long
@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_killed_in_every_phase_of_a_round_and_resumed_releases_the_same_models(executor: str, tmp_path: Path) -> None:
    words = [*RUN, "--trainer.executor", executor]
    whole, folder = keyed(tmp_path / "whole"), keyed(tmp_path / "killed")
    done = run_cli(*words, cwd=whole)
    assert done.returncode == 0, done.stderr
    started = start_cli(*words, cwd=folder, program=(sys.executable, "-m", "tests.privacy.support"))
    out, err = started.communicate(timeout=900)
    # Every place of the first and of the last round, and a process that comes through.
    killed = ["status -9"] * (2 * PLACES) + ["status 0"]
    assert [line for line in out.splitlines() if line.startswith("status")] == killed, err
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


@pytest.mark.long
def test_a_client_on_two_processes_is_the_client_on_one(tmp_path: Path) -> None:
    found: list[Path] = []
    for words in ([], ["--trainer.devices", "2", "--trainer.strategy", "ddp"]):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        done = run_cli(*SIMULATED, *words, cwd=folder)
        assert done.returncode == 0, done.stderr
        found.append(folder / "lightning_logs/version_0")
    one, two = found
    # Half batches averaged over processes round differently in float32 than whole batches do.
    for name, tensor in saved_weights(one).items():
        torch.testing.assert_close(tensor, saved_weights(two)[name], rtol=1e-4, atol=1e-5)
    assert (one / "privacy.md").read_text() == (two / "privacy.md").read_text()
