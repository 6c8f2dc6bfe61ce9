"""FedFomo against arithmetic: clients of `tests.support.Points`, half of whose samples are held out, w = 0."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed import Classifier
from lit_fed.data import ClassesPerClient, Digits
from lit_fed.errors import ConfigError
from lit_fed.methods import FedFomo, LocalOnly
from lit_fed.protocols import ClientTest, GlobalTest
from tests.methods.support import Rota
from tests.support import LeastSquares, Points, assert_same, fit, kept, rows


def fomo(**settings: Any) -> FedFomo:
    return FedFomo(**{"epsilon": 0.0, "calibration_fraction": 0.5, **settings})


def points(num_clients: int = 4) -> Points:
    """Clients 0 and 2 have y = 2 at x = (1, 0), clients 1 and 3 y = 4 at (0, 1); two samples each, or four."""
    return Points(num_clients, sizes=(2, 4))


def last(made: Any) -> list[list[float]]:
    found: list[list[float]] = made.run.federation.server["last"]["network.weight"][:, 0].tolist()
    return found


def affinity(made: Any) -> list[list[float]]:
    found: list[list[float]] = made.run.federation.server["affinity"].tolist()
    return found


def test_five_rounds_by_hand(tmp_path: Path) -> None:
    # One client a round, learning rate ½, M = 3, losses ½(w₁ − 2)² and ½(w₂ − 4)².
    # 0: client 0 gets nothing: (1, 0). 1: client 1 gets (1, 0), of the loss of its (0, 0), at distance 1: weight 0, and
    # trains (0, 0) to (0, 2). 2: client 2 gets (1, 0), weight (2 − ½)/1, and (0, 2), weight 0: it begins with (1, 0),
    # and goes to (1.5, 0). 3: client 3 gets all three; only (0, 2) helps, (8 − 2)/2 = 3: (0, 2) to (0, 3).
    made = fit(tmp_path / "four", None, points(), fomo(models=3), participation=Rota(), max_rounds=4)
    assert last(made) == [[1.0, 0.0], [0.0, 2.0], [1.5, 0.0], [0.0, 3.0]]
    assert affinity(made) == [[0.0] * 4, [0.0] * 4, [1.5, 0.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0]]
    # 4: client 0 began with (0, 0), its loss 2. Its own (1, 0): (2 − ½)/1; client 2's (1.5, 0): (2 − ⅛)/1.5 = 1.25;
    # (0, 2) and (0, 3): 0. It begins with (1.5 · 1 + 1.25 · 1.5)/2.75 = 27/22, and goes half the way to 2.
    made = fit(tmp_path / "five", None, points(), fomo(models=3), participation=Rota(), max_rounds=5)
    assert last(made)[0] == pytest.approx([1 + 27 / 44, 0.0])
    assert kept(made, 0)["state/network.weight"][0].tolist() == pytest.approx([27 / 22, 0.0])
    assert affinity(made)[0] == [0.0, 0.0, 1.25, 0.0]


def test_metrics_by_hand(tmp_path: Path) -> None:
    made = fit(tmp_path, None, points(2), fomo(models=1), protocols=[ClientTest(), GlobalTest()])
    # Neither helps the other: clients train their own models, (1.5, 0) and (0, 3), which are tested.
    assert last(made) == [[1.5, 0.0], [0.0, 3.0]]
    assert made.metrics["clients/loss_mean"] == (0.125 + 0.5) / 2
    assert "global/loss" not in made.metrics
    # Down a model of two numbers and its sender's, of eight bytes; up a model, and two weights.
    assert made.metrics["comm/downlink_bytes"] == 2 * (2 * 4 + 8)
    assert made.metrics["comm/uplink_bytes"] == 2 * (2 * 4 + 2 * 4)


def test_where_no_model_is_better_the_client_begins_as_before(tmp_path: Path) -> None:
    # Learning rate 2.5: client 0 goes from 0 to 5, its loss from 2 to 4.5. Client 2 begins with 0, as (5, 0) is worse:
    # (2 − 4.5)/5 = −½, and goes to 5 too. In round 4 client 0 begins with 0 again, and affinities fall below 0.
    made = fit(tmp_path, LeastSquares(2.5), points(), fomo(models=3), participation=Rota(), max_rounds=5)
    assert last(made)[0] == last(made)[2] == [5.0, 0.0]
    assert kept(made, 0)["state/network.weight"][0].tolist() == [0.0, 0.0]
    assert affinity(made)[2] == [-0.5, 0.0, 0.0, 0.0]
    assert affinity(made)[0] == [0.0, 0.0, -0.5, 0.0]


def server(seen: list[int], affinity: dict[int, float], count: int = 6) -> dict[str, Any]:
    made: dict[str, Any] = {"last": {"w": torch.arange(count, dtype=torch.float32).unsqueeze(1)}}
    made["seen"] = torch.tensor([one in seen for one in range(count)])
    made["affinity"] = torch.zeros(count, count, dtype=torch.float64)
    for one, value in affinity.items():
        made["affinity"][0, one] = value
    return made


def senders(method: FedFomo, state: dict[str, Any], round_idx: int) -> list[int]:
    payload = method.address(state, 0, round_idx, "model")
    found: list[int] = payload["senders"].tolist()
    assert payload["models.w"].flatten().tolist() == found  # client j's model is j
    return found


def ready(**settings: Any) -> FedFomo:
    method = fomo(**settings)
    method.seed, method.count = 1, 6
    return method


def test_the_models_of_the_largest_affinities_are_sent() -> None:
    state = server([0, 1, 2, 3, 5], {1: -1.0, 3: 2.0, 4: 9.0, 5: 1.0})  # 4 never took part, 2 has 0
    assert senders(ready(models=3), state, 7) == [3, 5, 2]
    assert senders(ready(models=9), state, 7) == [3, 5, 2, 1]
    assert ready(models=3).address(server([0], {}), 0, 7, "model") == {}
    assert ready(models=3).address(state, 0, 7, "model", "test") == {}


def test_random_models_are_sent_with_probability_epsilon_less_its_decay() -> None:
    state, rounds = server([1, 2, 3, 4, 5], {5: 1.0}), range(2000)
    # With M = 1 a model other than the best is sent with probability ε · 4/5 = 0.4; σ = √(0.4 · 0.6/2000) = 0.011.
    method = ready(models=1, epsilon=0.5, epsilon_decay=0.0)
    others = [one for round_idx in rounds if (one := senders(method, state, round_idx)[0]) != 5]
    assert len(others) / 2000 == pytest.approx(0.4, abs=0.044)
    assert {others.count(one) for one in range(1, 5)} <= set(range(140, 260))  # 200 each, σ = 13
    assert [senders(method, state, round_idx) for round_idx in rounds[:9]] == [
        senders(ready(models=1, epsilon=0.5, epsilon_decay=0.0), state, round_idx) for round_idx in rounds[:9]
    ]
    # ε falls to 0 in round 5: from then on the best is sent.
    falls = ready(models=1, epsilon=0.5, epsilon_decay=0.1)
    assert {senders(falls, state, round_idx)[0] for round_idx in range(5, 200)} == {5}


def test_without_models_it_is_local_training(tmp_path: Path) -> None:
    settings = {"max_rounds": 4, "local_epochs": 2}
    one = fit(tmp_path / "one", None, points(), FedFomo(0, calibration_fraction=0.0), **settings)
    other = fit(tmp_path / "other", None, points(), LocalOnly(), **settings)
    for client_id in range(4):
        alone = kept(one, client_id)
        assert_same({name: alone[name] for name in alone if "state/" not in name}, kept(other, client_id))


def digits(tmp_path: Path, executor: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    net = Classifier("mlp", lambda p: torch.optim.SGD(p, lr=0.1), input_shape=(1, 8, 8))
    data = Digits(num_clients=6, partition=ClassesPerClient(2), max_train_samples=300, batch_size=16)
    return fit(tmp_path / executor, net, data, FedFomo(models=2), executor=executor, max_rounds=3, **settings)


def test_in_groups_it_is_one_client_after_the_other(tmp_path: Path) -> None:
    alone, grouped = (digits(tmp_path, executor) for executor in ("sequential", "vectorized"))
    assert alone.run.federation.server["affinity"].count_nonzero() > 0
    for name, stack in alone.run.federation.server["last"].items():
        torch.testing.assert_close(grouped.run.federation.server["last"][name], stack, rtol=1e-4, atol=1e-6)
    found = [
        {(row["round"], row["client_id"]): row["value"] for row in table if row["metric"] == "downlink_bytes"}
        for table in (rows(made.log_dir / "clients.csv") for made in (alone, grouped))
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 3 * 6


@pytest.mark.parametrize("settings", [{"models": -1}, {"epsilon": 1.5}, {"epsilon_decay": -0.1}])
def test_wrong_settings(settings: dict[str, float]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=rf"algorithm\.{name} is"):
        FedFomo(**settings)
    with pytest.raises(ConfigError, match=r"set algorithm\.calibration_fraction above 0"):
        FedFomo(calibration_fraction=0.0)
