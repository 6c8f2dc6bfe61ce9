"""IFCA against arithmetic: `tests.support.Points`, the first model at w = 0, the second where `Reset` says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_fed import Classifier
from lit_fed.data import ClassesPerClient, Digits
from lit_fed.errors import ConfigError
from lit_fed.methods import IFCA
from lit_fed.participation import Asynchronous, Speeds
from lit_fed.protocols import ClientTest, GlobalTest
from tests.methods.support import Rota, run_quickstart
from tests.support import LeastSquares, Points, assert_same, fit, rows, saved_weights

CLUSTERS = "clusters.network.weight"


class Reset(nn.Linear):
    """Begins anew at given weights."""

    def __init__(self, to: Sequence[float]) -> None:
        self.to_what = torch.tensor([to])
        super().__init__(2, 1, bias=False)

    def reset_parameters(self) -> None:
        self.weight.data.copy_(self.to_what)


def task(*to: float) -> LeastSquares:
    made = LeastSquares()
    made.network = Reset(to)
    nn.init.zeros_(made.network.weight)
    return made


def models(made: Any) -> list[list[float]]:
    found: Tensor = made.run.federation.server[CLUSTERS]
    return found[:, 0].tolist()


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # θ = (0, 0) and (3, 9). Losses of client 0: ½·2² and ½·1², of client 1: ½·4² and ½·5²: each has its own cluster.
    # Round 0: client 0: 3 − ½·1 = 2.5; client 1: 0 + ½·4 = 2. Round 1: 2.5 − ½·½ = 2.25; 2 + ½·2 = 3.
    made = fit(tmp_path, task(3, 9), algorithm=IFCA(), protocols=[GlobalTest(), ClientTest()])
    assert models(made) == [[0.0, 3.0], [2.25, 9.0]]
    assert made.metrics["server/clusters"] == 2
    assert made.metrics["clients/loss_mean"] == pytest.approx((0.25**2 + 1) / 4)
    assert "global/loss" not in made.metrics
    # Down two models of two numbers, up one and two numbers for the cluster; four bytes, two clients.
    assert (made.metrics["comm/downlink_bytes"], made.metrics["comm/uplink_bytes"]) == (32, 32)


def test_between_probes_a_client_keeps_its_cluster(tmp_path: Path) -> None:
    # Learning rate 5, θ = (0, 0), (3, 9). Round 0: client 0 takes (3, 9), of the losses ½·2² and ½·1², to w₁ = 3 − 5;
    # client 1 takes (0, 0), ½·4² and ½·5², to w₂ = 20. Round 1: another choice would be better for both, ½·4² against
    # ½·2² and ½·16² against ½·5²; they go on to −2 + 20 = 18 and 20 − 80 = −60. Round 2: client 0 takes (0, −60),
    # ½·16² against ½·2², to w₁ = 10, and client 1 (18, 9), ½·64² against ½·5², to w₂ = 9 − 25.
    made = task(3, 9)
    made.lr = 5.0
    two = fit(tmp_path / "two", made, algorithm=IFCA(probe_every=2), protocols=[ClientTest()])
    assert models(two) == [[0.0, -60.0], [18.0, 9.0]]
    assert two.run.federation.server["taken"].tolist() == [1, 0]
    # Tested with the cluster that they chose last: 18 misses 2 by 16, −60 misses 4 by 64.
    assert two.metrics["clients/loss_mean"] == (16**2 + 64**2) / 4
    # Down a model of two numbers and an index of eight bytes, up two numbers and two for the cluster; two clients.
    assert (two.metrics["comm/downlink_bytes"], two.metrics["comm/uplink_bytes"]) == (32, 32)
    made = task(3, 9)
    made.lr = 5.0
    three = fit(tmp_path / "three", made, algorithm=IFCA(probe_every=2), max_rounds=3)
    assert models(three) == [[10.0, -60.0], [18.0, -16.0]]
    assert three.metrics["comm/downlink_bytes"] == 2 * 2 * 2 * 4  # all models again


def test_a_client_that_never_chose_gets_all_models(tmp_path: Path) -> None:
    made = fit(tmp_path, task(3, 9), Points(4), IFCA(3, probe_every=100), participation=Rota(), max_rounds=6)
    found = [int(row["value"]) for row in rows(made.log_dir / "clients.csv") if row["metric"] == "downlink_bytes"]
    assert found == [3 * 8] * 4 + [8 + 8] * 2
    assert made.run.federation.server["taken"].tolist() == [1, 0, 1, 0]


def test_where_every_round_is_a_probe_nothing_is_addressed(tmp_path: Path) -> None:
    assert not IFCA().addresses
    assert IFCA(probe_every=2).addresses
    made = fit(tmp_path, task(3, 9), algorithm=IFCA(), max_rounds=1)
    assert made.run.federation.broadcast(1).addressed is None
    assert made.run.federation.server.keys() == {CLUSTERS}


def test_stale_movements_of_one_model_are_those_of_all(tmp_path: Path) -> None:
    # Two clients at work, each of its own cluster from its first round on, so that both runs make the same models.
    def run(folder: str, probe_every: int) -> Any:
        flights = Asynchronous(concurrency=2, buffer=1, speeds=Speeds(sigma=1.0))
        method = IFCA(probe_every=probe_every)
        return fit(tmp_path / folder, task(3, 9), Points(), method, participation=flights, max_rounds=6)

    assert models(run("one", 100)) == models(run("all", 1))


@pytest.mark.parametrize(("weighting", "mean"), [("uniform", [2.75, 3.25]), ("samples", [2.875, 3.375])])
def test_a_cluster_without_clients_stays(tmp_path: Path, weighting: Any, mean: list[float]) -> None:
    # θ = (0, 0) and (3, 3): both take the second, to (2.5, 3) and (3, 3.5), with one sample and three.
    made = fit(tmp_path, task(3, 3), algorithm=IFCA(weighting=weighting), max_rounds=1)
    assert models(made) == [[0.0, 0.0], mean]
    assert made.metrics["server/clusters"] == 1


def test_with_one_cluster_it_is_fedavg(tmp_path: Path) -> None:
    ifca = run_quickstart(
        tmp_path / "ifca", "--algorithm", "IFCA", "--algorithm.clusters", "1", "--algorithm.weighting", "samples"
    )
    server = torch.load(ifca / "checkpoints" / "last.ckpt", weights_only=True)["server"]
    only = {name.removeprefix("clusters."): tensor[0] for name, tensor in server.items()}
    assert_same(only, saved_weights(run_quickstart(tmp_path / "fedavg")))


def test_in_groups_it_is_one_client_after_the_other(tmp_path: Path) -> None:
    def run(executor: str) -> Any:
        torch.manual_seed(0)
        net = Classifier("mlp", lambda p: torch.optim.SGD(p, lr=0.1), input_shape=(1, 8, 8))
        data = Digits(num_clients=4, partition=ClassesPerClient(2), max_train_samples=200, batch_size=16)
        return fit(tmp_path / executor, net, data, IFCA(), executor=executor, max_rounds=3, protocols=[ClientTest()])

    alone, grouped = run("sequential"), run("vectorized")
    for name, tensor in alone.run.federation.server.items():
        torch.testing.assert_close(grouped.run.federation.server[name], tensor, rtol=1e-4, atol=1e-6)
    assert [row["value"] for row in rows(alone.log_dir / "clients.csv") if row["metric"] == "uplink_bytes"] == [
        row["value"] for row in rows(grouped.log_dir / "clients.csv") if row["metric"] == "uplink_bytes"
    ]


class Noisy(LeastSquares):
    """Its loss is a random number, and no gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.rand(()) + 0.0 * self.loss(batch)


def test_a_task_that_draws_random_numbers_chooses_alike_when_it_is_resumed(tmp_path: Path) -> None:
    def run(folder: str, rounds: int, ckpt_path: str | None = None) -> Any:
        made = Noisy()
        made.network = Reset((3, 9))
        nn.init.zeros_(made.network.weight)
        return fit(tmp_path / folder, made, Points(10), Choosing(), max_rounds=rounds, ckpt_path=ckpt_path)

    whole = run("whole", 3)
    run("parts", 1)
    torch.manual_seed(5)
    found = [made.run.federation.server["chosen"].tolist() for made in (whole, run("parts", 3, "last"))]
    assert found[0] == found[1]  # each of 20 clients chose one of two by chance


class Choosing(IFCA):
    """Adds up the clients that chose each cluster."""

    def setup(self, models: Any, population: Any) -> Any:
        return {**super().setup(models, population), "chosen": torch.zeros(2)}

    def step(self, server: Any, aggregate: Any, cohort: Any) -> dict[str, float]:
        server["chosen"] = 3 * server["chosen"] + aggregate["chosen"]
        return super().step(server, aggregate, cohort)


def test_clients_of_one_kind_come_together(tmp_path: Path) -> None:
    # Clients 0 and 2 have y = 2 at x = (1, 0), clients 1 and 3 y = 4 at (0, 1): two clusters, each with its minimum.
    made = fit(tmp_path, task(3, 9), Points(num_clients=4), IFCA(), max_rounds=20)
    assert [models(made)[0][1], models(made)[1][0]] == pytest.approx([4.0, 2.0], abs=1e-4)


def test_wrong_settings(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T

    with pytest.raises(ConfigError, match=r"algorithm\.clusters is 0"):
        IFCA(clusters=0)
    with pytest.raises(ConfigError, match=r"algorithm\.probe_every is 0"):
        IFCA(probe_every=0)
    bare = LeastSquares()
    bare.network = Bare()
    with pytest.raises(ConfigError, match="no module of the network has reset_parameters"):
        fit(tmp_path, bare, algorithm=IFCA())
