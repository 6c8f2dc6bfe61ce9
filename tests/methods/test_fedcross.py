"""FedCross against arithmetic: two or four clients of `tests.support.Points`, w = 0, learning rate ½."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed import Classifier
from lit_fed.data import ClassesPerClient, Digits
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedCross
from lit_fed.participation import Asynchronous, UniformParticipation
from lit_fed.protocols import GlobalTest
from tests.support import LeastSquares, Points, Wanderer, assert_same, fit, rows, weights


def middleware(made: Any) -> list[list[float]]:
    found: list[list[float]] = made.run.federation.server["middleware"]["network.weight"][:, 0].tolist()
    return found


class InPlace(FedCross):
    """Client i of round t trains model i + t (modulo K)."""

    def address(self, server: Any, client_id: int, round_idx: int, kind: str, stage: Any = "train") -> Any:
        self._dealt = round_idx, {one: (one + round_idx) % self.count for one in range(self.count)}
        return super().address(server, client_id, round_idx, kind, stage)


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # α = ¾. Round 0: v = (1, 0), (0, 2); w_0 = ¾(1, 0) + ¼(0, 2) = (.75, .5), w_1 = (.25, 1.5). Round 1: client 0 has
    # w_1: .25 + ½ · 1.75 = 1.125; client 1 w_0: .5 + ½ · 3.5 = 2.25: v_0 = (.75, 2.25), v_1 = (1.125, 1.5).
    # w_0 = ¾ v_0 + ¼ v_1 = (.84375, 2.0625), w_1 = (1.03125, 1.6875); their mean (.9375, 1.875).
    made = fit(tmp_path, algorithm=InPlace(0.75), protocols=[GlobalTest()])
    assert middleware(made) == [[0.84375, 2.0625], [1.03125, 1.6875]]
    assert weights(made)["network.weight"].tolist() == [[0.9375, 1.875]]
    # Each of four samples counts once: client 0's misses 2 by 1.0625, client 1's three miss 4 by 2.125.
    assert made.metrics["global/loss"] == pytest.approx((1.0625**2 + 3 * 2.125**2) / 8)
    # Down and up a model of two numbers, and a place of eight bytes, for two clients.
    assert made.metrics["comm/downlink_bytes"] == made.metrics["comm/uplink_bytes"] == 2 * (2 * 4 + 8)


def partners(method: FedCross, stack: list[list[float]], round_idx: int = 0) -> list[int]:
    method.count = len(stack)
    method.model = type("Layout", (), {"parameters": {"w": None}})()
    found: list[int] = method._partners({"w": torch.tensor(stack)}, round_idx).tolist()
    return found


def test_partners_in_order_go_round_and_never_meet_themselves() -> None:
    # K = 4: offsets 1, 2, 3, 1 in rounds 0 to 3.
    found = [partners(FedCross(partner="in_order"), [[1.0]] * 4, round_idx) for round_idx in range(4)]
    assert found == [[1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2], [1, 2, 3, 0]]
    assert partners(FedCross(partner="in_order"), [[1.0]]) == partners(FedCross(), [[1.0]]) == [0]


def test_partners_of_the_lowest_similarity() -> None:
    # Cosines of (1, 0), (1, 1), (0, 2) and (−3, 1): 0-1 .71, 0-2 0, 0-3 −.95; 1-2 .71, 1-3 −.45; 2-3 .32. Lengths
    # do not count, nor a model's cosine with itself.
    assert partners(FedCross(), [[1.0, 0.0], [1.0, 1.0], [0.0, 2.0], [-3.0, 1.0]]) == [3, 3, 0, 0]


def test_half_of_two_models_each_is_fedavg(tmp_path: Path) -> None:
    settings = {"max_rounds": 4, "buffers": "average"}
    made = []
    for name, method in (("cross", FedCross(0.5)), ("avg", FedAvg("uniform"))):
        torch.manual_seed(0)
        made.append(fit(tmp_path / name, Wanderer(), Points(sizes=(2, 3)), method, **settings))
    stacks = made[0].run.federation.server["middleware"]
    for row in range(2):
        assert_same({name: stack[row] for name, stack in stacks.items()}, weights(made[1]))
    assert_same(weights(made[0]), weights(made[1]))


def test_every_client_of_a_round_trains_another_model(tmp_path: Path) -> None:
    participation = UniformParticipation(count=4)
    made = fit(tmp_path, None, Points(9), FedCross(), participation=participation, max_rounds=1)
    server, method = made.run.federation.server, made.run.federation.algorithm
    dealt = []
    for round_idx in range(20):
        cohort = [one.client_id for one in participation.plan(round_idx)]
        places = {one: int(method.address(server, one, round_idx, "model")["place"]) for one in cohort}
        assert sorted(places.values()) == [0, 1, 2, 3]
        dealt.append([places[one] for one in sorted(places)])
    assert len({tuple(one) for one in dealt}) > 5  # of 24 orders


def test_a_model_without_an_update_stays_but_for_its_partner(tmp_path: Path) -> None:
    # α = ¾; model 1 gets no update in round 0: v = (1, 0), (0, 0): w = (.75, 0), (.25, 0).
    class Lossy(InPlace):
        def step(self, server: Any, aggregate: Any, cohort: Any) -> dict[str, float]:
            return super().step(server, [one for one in aggregate if one.client_id == 0], cohort)

    assert middleware(fit(tmp_path, algorithm=Lossy(0.75), max_rounds=1)) == [[0.75, 0.0], [0.25, 0.0]]


def test_in_groups_it_is_one_client_after_the_other(tmp_path: Path) -> None:
    def run(executor: str) -> Any:
        torch.manual_seed(0)
        net = Classifier("mlp", lambda p: torch.optim.SGD(p, lr=0.1), input_shape=(1, 8, 8))
        data = Digits(num_clients=4, partition=ClassesPerClient(2), max_train_samples=200, batch_size=16)
        return fit(tmp_path / executor, net, data, FedCross(), executor=executor, max_rounds=3)

    alone, grouped = run("sequential"), run("vectorized")
    for name, stack in alone.run.federation.server["middleware"].items():
        torch.testing.assert_close(grouped.run.federation.server["middleware"][name], stack, rtol=1e-4, atol=1e-6)
    found = [
        {(row["round"], row["client_id"]): row["value"] for row in table if row["metric"] == "downlink_bytes"}
        for table in (rows(made.log_dir / "clients.csv") for made in (alone, grouped))
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 3 * 4


def test_wrong_settings(tmp_path: Path) -> None:
    for alpha in (0.4, 1.1):
        with pytest.raises(ConfigError, match=r"algorithm\.alpha is"):
            FedCross(alpha)
    with pytest.raises(ConfigError, match=r"algorithm\.partner"):
        FedCross(partner="highest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="FedCross needs updates that start from one model"):
        fit(tmp_path, LeastSquares(), Points(4), FedCross(), participation=Asynchronous(concurrency=2, buffer=1))
