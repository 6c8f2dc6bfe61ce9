"""FedAMP against arithmetic: two clients of `tests.support.Points`, w = 0, learning rate ½."""

from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed import Classifier
from lit_fed.data import ClassesPerClient, Digits
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAMP, FedAvg, LocalOnly
from lit_fed.protocols import ClientTest, GlobalTest
from tests.methods.support import Rota
from tests.support import Points, assert_same, fit, kept, weights


def last(made: Any) -> list[list[float]]:
    found: list[list[float]] = made.run.federation.server["last"]["network.weight"][:, 0].tolist()
    return found


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # Round 0 from w = u = 0: (1, 0) and (0, 2), at squared distance 5. Round 1 with σ = 5, α = 1: ξ = e⁻¹/5, and
    # u_0 = (1 − ξ, 2ξ), u_1 = (ξ, 2 − 2ξ). Client 0 has the gradient (1 − 2, 0) + λ/α · (ξ, −2ξ), client 1
    # (0, 2 − 4) + λ/α · (−ξ, 2ξ); λ/α = 1.
    made = fit(tmp_path, algorithm=FedAMP(sigma=5.0), protocols=[ClientTest(), GlobalTest()])
    xi = exp(-1) / 5
    assert last(made)[0] == pytest.approx([1.5 - xi / 2, xi])
    assert last(made)[1] == pytest.approx([xi / 2, 3 - xi])
    assert [kept(made, one)["network.weight"][0].tolist() for one in range(2)] == last(made)
    # Their own models are tested: 0 misses 2 by ½ + ξ/2, 1 misses 4 by 1 + ξ.
    assert made.metrics["clients/loss_mean"] == pytest.approx(((0.5 + xi / 2) ** 2 + (1 + xi) ** 2) / 4)
    assert "global/loss" not in made.metrics
    assert made.metrics["comm/downlink_bytes"] == made.metrics["comm/uplink_bytes"] == 2 * 2 * 4


def test_lambda_enters_over_alpha(tmp_path: Path) -> None:
    # λ/α = 2/4, and ξ = 4/8 · e^(−5/8): client 0 along (1, 0) − ½(ξ, −2ξ) by ½, client 1 along (0, 2) − ½(−ξ, 2ξ).
    made = fit(tmp_path, algorithm=FedAMP(lam=2.0, alpha=4.0, sigma=8.0))
    xi = exp(-5 / 8) / 2
    assert last(made)[0] == pytest.approx([1.5 - xi / 4, xi / 2])
    assert last(made)[1] == pytest.approx([xi / 4, 3 - xi / 2])


def test_a_client_that_never_took_part_is_in_nobodys_sum(tmp_path: Path) -> None:
    # Client 0 alone in rounds 0 and 2 of three; client 1 in round 1 gets u = (1 − ξ)·0 + ξ(1, 0), at distance 1.
    made = fit(tmp_path / "one", algorithm=FedAMP(sigma=5.0), participation=Rota(), max_rounds=1)
    server, method = made.run.federation.server, made.run.federation.algorithm
    assert method.address(server, 0, 1, "model")["network.weight"][0].tolist() == [1.0, 0.0]
    found = method.address(server, 1, 1, "model")["network.weight"][0].tolist()
    assert found == pytest.approx([exp(-1 / 5) / 5, 0.0])
    assert method.address(server, 1, 1, "model", "test") == {}


def test_without_lambda_it_is_local_training(tmp_path: Path) -> None:
    one = fit(tmp_path / "one", None, Points(4), FedAMP(lam=0.0), max_rounds=4, local_epochs=2)
    other = fit(tmp_path / "other", None, Points(4), LocalOnly(), max_rounds=4, local_epochs=2)
    for client_id in range(4):
        assert_same(kept(one, client_id), kept(other, client_id))


def test_with_far_sight_all_are_addressed_the_mean_of_fedavg(tmp_path: Path) -> None:
    # σ → ∞ with α = σ/n: ξ = 1/n for all, so that every u is the mean.
    made = fit(tmp_path / "amp", None, Points(4), FedAMP(alpha=2.0**60, sigma=2.0**62), max_rounds=1)
    mean = weights(fit(tmp_path / "avg", None, Points(4), FedAvg(weighting="uniform"), max_rounds=1))
    for client_id in range(4):
        assert_same(dict(made.run.federation.broadcast(1).received(client_id, "model")), mean)


def test_in_groups_it_is_one_client_after_the_other(tmp_path: Path) -> None:
    def run(executor: str) -> Any:
        torch.manual_seed(0)
        net = Classifier("mlp", lambda p: torch.optim.SGD(p, lr=0.1), input_shape=(1, 8, 8))
        data = Digits(num_clients=4, partition=ClassesPerClient(2), max_train_samples=200, batch_size=16)
        return fit(tmp_path / executor, net, data, FedAMP(), executor=executor, max_rounds=3)

    alone, grouped = run("sequential"), run("vectorized")
    for name, stack in alone.run.federation.server["last"].items():
        torch.testing.assert_close(grouped.run.federation.server["last"][name], stack, rtol=1e-4, atol=1e-6)


def test_extrapolation_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, None, Points(4), FedAMP(sigma=2.0), max_rounds=1)
    assert "algorithm.alpha · (clients − 1) / algorithm.sigma is 1.5: above 1" in capsys.readouterr().out


@pytest.mark.parametrize("settings", [{"lam": -1.0}, {"alpha": 0.0}, {"sigma": 0.0}])
def test_wrong_settings(settings: dict[str, float]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=rf"algorithm\.{name} is"):
        FedAMP(**settings)
