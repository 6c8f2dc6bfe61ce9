"""FedExP against arithmetic, its reduction to FedAvg, and which of its models is evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.methods import FedAvg, FedExP
from lit_fed.protocols import ClientTest, GlobalTest
from tests.support import LeastSquares, Points, assert_same, fit, weights


def half_done() -> LeastSquares:
    """From w = (0, 4), where client 1 has nothing left to do."""
    module = LeastSquares()
    with torch.no_grad():
        module.network.weight[0, 1] = 4.0  # type: ignore[operator]
    return module


def run(folder: Path, rounds: int, epsilon: float = 0.0375, **kwargs: Any) -> Any:
    return fit(folder, half_done(), Points(), FedExP(epsilon=epsilon, **kwargs), max_rounds=rounds)


# ε = 0.0375, weights ¼ and ¾.
# Round 0: client 0 moves by ½·2 = 1, client 1 not at all. Σ p‖Δ‖² = ¼, Δ̄ = ¼, ‖Δ̄‖² = 0.0625:
#   η = 0.25/(2·(0.0625 + 0.0375)) = 1.25; w₁ = 0 + 1.25·0.25 = 0.3125
# Round 1: client 0 moves by ½·(2 − 0.3125) = 0.84375. Σ p‖Δ‖² = 0.84375²/4 = 0.177978516, Δ̄ = 0.2109375,
#   ‖Δ̄‖² = 0.044494629; η = 0.177978516/(2·0.081994629) = 1.085306136; w₁ = 0.3125 + 1.085306136·0.2109375 =
# 0.541431763 Mean of the two iterates: (0.3125 + 0.541431763)/2 = 0.426965881.


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    first, second = run(tmp_path, 1), run(tmp_path, 2)
    assert first.metrics["server/step_size"] == pytest.approx(1.25)
    assert second.metrics["server/step_size"] == pytest.approx(1.085306136)
    assert second.metrics["server/update_norm"] == pytest.approx(0.541431763 - 0.3125, rel=1e-6)
    assert weights(first)["network.weight"][0].tolist() == [0.3125, 4.0]
    assert weights(second)["network.weight"][0].tolist() == pytest.approx([0.426965881, 4.0])
    plain = run(tmp_path, 2, average_last_two=False)
    assert weights(plain)["network.weight"][0].tolist() == pytest.approx([0.541431763, 4.0])


def test_uniform_weights_by_hand(tmp_path: Path) -> None:
    # Σ p‖Δ‖² = ½, Δ̄ = ½: η = 0.5/(2·(0.25 + 0.0375)) is below 1, so the step is 1 and w₁ = ½.
    made = run(tmp_path, 1, weighting="uniform")
    assert made.metrics["server/step_size"] == 1.0
    assert weights(made)["network.weight"][0].tolist() == [0.5, 4.0]


def test_the_mean_is_evaluated_and_the_iterate_trained_from(tmp_path: Path) -> None:
    module = half_done()
    made = fit(tmp_path, module, Points(), FedExP(epsilon=0.0375), max_rounds=2)
    federation = made.run.federation
    iterate, mean = pytest.approx(0.541431763), pytest.approx(0.426965881)
    assert federation.broadcast(2).payloads["model"]["network.weight"][0, 0].item() == iterate
    assert federation.broadcast(1, "test").payloads["model"]["network.weight"][0, 0].item() == mean
    assert (
        weights(made)["network.weight"][0, 0].item() == module.state_dict()["network.weight"][0, 0].item() == mean
    )  # what the caller holds in the end
    # Client 0's sample has loss ½·(2 − 0.426965881)² = 1.237218, client 1's three have none.
    assert made.metrics["clients/loss_mean"] == pytest.approx(1.237218 / 2, rel=1e-5)
    assert made.metrics["global/loss"] == pytest.approx(1.237218 / 4, rel=1e-5)


def test_resumes_from_the_iterate(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    parts = fit(tmp_path / "parts", half_done(), Points(), FedExP(epsilon=0.0375), max_rounds=4, ckpt_path="last")
    assert_same(weights(whole), weights(parts))
    iterates = [made.run.federation.server["model"] for made in (whole, parts)]
    assert_same(*iterates)
    assert not torch.equal(iterates[0]["network.weight"], weights(whole)["network.weight"])  # which is a mean


def test_evaluating_changes_nothing_that_follows(tmp_path: Path) -> None:
    often = fit(
        tmp_path / "often", half_done(), Points(), FedExP(), max_rounds=4, protocols=[ClientTest(), GlobalTest()]
    )
    never = fit(tmp_path / "never", half_done(), Points(), FedExP(), max_rounds=4, evaluate_every=0)
    assert_same(weights(often), weights(never))


@pytest.mark.parametrize("num_clients", [1, 2])
def test_where_the_step_is_1_it_is_fedavg(num_clients: int, tmp_path: Path) -> None:
    # With one client η = ‖Δ‖²/(2(‖Δ‖² + ε)) is below ½. With two that move at right angles by 1 and 2, weights ¼ and ¾,
    # it is 3.25/(2·2.3125) at first, and below 1 while client 1's share of ‖Δ̄‖² dominates.
    parts: Any = {"data": Points(num_clients), "max_rounds": 2}
    plain = fit(tmp_path, algorithm=FedAvg(), **parts)
    other = fit(tmp_path, algorithm=FedExP(average_last_two=False), **parts)
    assert other.metrics["server/step_size"] == 1.0
    torch.testing.assert_close(weights(other), weights(plain), rtol=1e-6, atol=1e-6)


def test_nothing_more_is_sent_than_by_fedavg(tmp_path: Path) -> None:
    plain, other = fit(tmp_path, max_rounds=2).metrics, run(tmp_path, 2).metrics
    for name in ("comm/uplink_bytes", "comm/downlink_bytes"):
        assert other[name] == plain[name]
