"""The streaming mixture against two passes over all clients, in any order and over any processes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import Fabric
from scipy.special import logsumexp
from torch import Tensor

from lit_fed.engine.wire.payload import ClientUpdate, Payload
from lit_fed.engine.wire.workers import Workers
from lit_fed.methods.distillation.mixing import Mixed, SoftmaxMix, SoftmaxSum
from tests.engine.method.test_reducers import in_two_processes

ALONE = Workers(Fabric(accelerator="cpu", devices=1))
TAUS = st.sampled_from([0.0, 0.01, 0.25, 1.0, 3.0, math.inf])

# P = 3 public samples, C = 2 values; scores as far apart as log densities are, and some of a client without a density.
score = st.floats(-1e6, 1e3) | st.floats(-30, 0) | st.just(-math.inf)
value = st.floats(0, 1, width=32)
client = st.tuples(st.lists(score, min_size=3, max_size=3), st.lists(value, min_size=6, max_size=6))
cohort = st.lists(client, min_size=1, max_size=9)


def read(payload: Payload) -> tuple[Tensor, Tensor]:
    return payload["values"], payload["scores"]


def updates(clients: Any) -> list[ClientUpdate]:
    return [
        ClientUpdate(
            i, {"values": torch.tensor(values).view(3, 2), "scores": torch.tensor(scores, dtype=torch.float64)}
        )
        for i, (scores, values) in enumerate(clients)
    ]


def stream(made: list[ClientUpdate], tau: float, workers: Workers = ALONE) -> Mixed:
    reducer = SoftmaxMix(read, tau, watched=range(100))
    for update in made:
        reducer.add(update)
    mixed = reducer.result(workers)
    assert mixed is not None
    return mixed


def two_passes(clients: Any, tau: float) -> tuple[Any, Any]:
    """Weights (M, P) and mixture (P, C) by NumPy and SciPy, from all clients at once."""
    scores = np.array([scores for scores, _ in clients], dtype=np.float64)
    values = np.array([values for _, values in clients], dtype=np.float32).astype(np.float64).reshape(-1, 3, 2)
    if math.isinf(tau):
        best = scores == scores.max(0)
        weights = best / best.sum(0)
    elif tau == 0:
        weights = np.full(scores.shape, 1 / len(scores))
    else:
        scaled = tau * np.where(np.isneginf(scores).all(0), 0.0, scores)  # nobody has a density: all alike
        weights = np.exp(scaled - logsumexp(scaled, axis=0))
    return weights, np.einsum("mp,mpc->pc", weights, values)


@settings(deadline=None)  # a busy machine is not a wrong mixture
@given(cohort, TAUS, st.randoms(use_true_random=False))
def test_one_pass_equals_two_in_any_order(clients: Any, tau: float, random: Any) -> None:
    made = updates(clients)
    random.shuffle(made)
    mixed = stream(made, tau)
    weights, mean = two_passes(clients, tau)
    # logsumexp of scores around 10⁶ is itself only good to 10⁶·2⁻⁵³ ≈ 10⁻¹⁰, so it gets differences to the largest.
    np.testing.assert_allclose(mixed.mean.numpy(), mean, rtol=0, atol=1e-9)
    peak = np.array([scores for scores, _ in clients]).max(0)
    near = [([s - p if np.isfinite(p) else s for s, p in zip(scores, peak, strict=True)], v) for scores, v in clients]
    weights, mean = two_passes(near, tau)
    np.testing.assert_allclose(mixed.mean.numpy(), mean, rtol=0, atol=1e-12)
    np.testing.assert_allclose(mixed.concentration.numpy(), (weights**2).sum(0), rtol=0, atol=1e-12)
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(0)
    np.testing.assert_allclose(mixed.entropy.numpy(), entropy, rtol=0, atol=1e-12)
    for client_id, found in mixed.weights.items():
        np.testing.assert_allclose(found.numpy(), weights[client_id], rtol=0, atol=1e-12)
    assert mixed.weights.keys() == set(range(len(clients)))


@settings(deadline=None)  # a busy machine is not a wrong mixture
@given(cohort, TAUS, st.lists(st.integers(0, 3), min_size=9, max_size=9), st.permutations(range(4)))
def test_any_split_over_ranks_gives_the_same(clients: Any, tau: float, ranks: list[int], order: list[int]) -> None:
    parts = [SoftmaxSum(tau) for _ in range(4)]
    for update, rank in zip(updates(clients), ranks, strict=False):
        parts[rank].add(*read(update.payload))
    whole = SoftmaxSum(tau)
    for rank in order:
        whole.merge(parts[rank])
    alone = stream(updates(clients), tau)
    torch.testing.assert_close(whole.result().mean, alone.mean, rtol=0, atol=1e-12)
    assert torch.equal(whole.result().mean.float(), alone.mean.float()) or tau not in (0, math.inf)


@pytest.mark.parametrize("tau", [0.0, 0.25, math.inf])
@pytest.mark.parametrize("count", [1, 5])
def test_two_processes_are_one(tau: float, count: int) -> None:
    """With one client, the second process has none."""
    generator = np.random.default_rng(3)
    clients = [((generator.normal(size=3) * 100).tolist(), generator.random(6).tolist()) for _ in range(count)]

    def work(workers: Workers) -> Any:
        mixed = stream(updates(clients)[workers.rank :: 2] if count > 1 or not workers.rank else [], tau, workers)
        weights = {client_id: tensor.tolist() for client_id, tensor in mixed.weights.items()}
        return mixed.mean.tolist(), mixed.concentration.tolist(), weights

    mean, concentration, weights = in_two_processes(work)
    mean, concentration = (torch.tensor(found, dtype=torch.float64) for found in (mean, concentration))
    alone = stream(updates(clients), tau)
    torch.testing.assert_close(mean, alone.mean, rtol=0, atol=1e-14)
    torch.testing.assert_close(concentration, alone.concentration, rtol=0, atol=1e-14)
    assert torch.equal(mean.float(), alone.mean.float())
    assert weights.keys() == alone.weights.keys()


def test_two_processes_without_a_client_have_no_mixture() -> None:
    assert in_two_processes(lambda workers: SoftmaxMix(read, 1.0).result(workers)) is None
    assert SoftmaxMix(read, 1.0).result(ALONE) is None


def test_two_clients_by_hand() -> None:
    # One sample; e^ℓ is 1 and 3, so w = (¼, ¾): p = ¼·(1, 0) + ¾·(0, 1), χ = 1/16 + 9/16 = 0.625,
    # H = ¼·ln 4 + ¾·ln(4/3) = 0.34657 + 0.21576 = 0.56234.
    clients = [([0.0] * 3, [1.0, 0.0] * 3), ([math.log(3)] * 3, [0.0, 1.0] * 3)]
    mixed = stream(updates(clients), 1.0)
    torch.testing.assert_close(mixed.mean[0], torch.tensor([0.25, 0.75], dtype=torch.float64))
    assert mixed.concentration[0].item() == pytest.approx(0.625)
    assert mixed.entropy[0].item() == pytest.approx(0.56234, abs=1e-5)
    # τ = ½ gives √3: w = (1, 1.73205)/2.73205 = (0.36603, 0.63397).
    assert stream(updates(clients), 0.5).mean[0, 0].item() == pytest.approx(0.36603, abs=1e-5)
    assert stream(updates(clients), 0.0).mean[0].tolist() == [0.5, 0.5]
    assert stream(updates(clients), math.inf).mean[0].tolist() == [0.0, 1.0]


def test_scores_that_would_underflow_or_overflow() -> None:
    clients = [([-1e6, 1e6, -math.inf], [1.0, 0.0] * 3), ([-1e6 - 1, 1e6 - 1, -1e6], [0.0, 1.0] * 3)]
    mixed = stream(updates(clients), 1.0)
    first = 1 / (1 + math.exp(-1))
    assert mixed.mean[:, 0].tolist() == pytest.approx([first, first, 0.0], abs=1e-12)
    assert stream(updates(clients), math.inf).mean[:, 0].tolist() == [1.0, 1.0, 0.0]


def test_a_large_temperature_goes_to_the_most_confident() -> None:
    clients = [([-3.0, -1.0, -2.0], [1.0, 0.0] * 3), ([-2.0, -2.0, -2.0], [0.0, 1.0] * 3)]
    torch.testing.assert_close(
        stream(updates(clients), 1e6).mean, stream(updates(clients), math.inf).mean, rtol=0, atol=0
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 60))
def test_memory_does_not_grow_with_the_clients(count: int) -> None:
    reducer = SoftmaxMix(read, 1.0)
    for update in updates([([0.0, -1.0, -2.0], [0.5] * 6)]) * count:
        reducer.add(update)
    held = [reducer._sum.sums, reducer._sum.peak, *reducer._scores.values()]
    assert sum(tensor.numel() for tensor in held if tensor is not None) == 3 * (2 + 3) + 3


def test_shapes_that_differ_are_refused() -> None:
    reducer = SoftmaxMix(read, 1.0)
    reducer.add(updates([([0.0] * 3, [0.5] * 6)])[0])
    with pytest.raises(ValueError, match=r"client 7 sends predictions in shape \(2, 2\)"):
        reducer.add(ClientUpdate(7, {"values": torch.zeros(2, 2), "scores": torch.zeros(2)}))
    with pytest.raises(ValueError, match="must not be negative"):
        SoftmaxSum(-1.0)
