"""Sparse codecs: the published bounds, and error feedback by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_fed.codecs import Context, RandomK, TopK
from lit_fed.errors import ConfigError

VALUES = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=60)


@given(VALUES, st.floats(0.01, 1))
def test_the_largest_entries_contract_the_error(values: list[float], share: float) -> None:
    """‖C(x) − x‖² ≤ (1 − k/d) ‖x‖², Stich et al. 2018."""
    x, codec = torch.tensor(values, dtype=torch.float64), TopK(share)
    found = codec.decode(codec.encode({"x": x}, Context()), Context())["x"]
    k = math.ceil(share * len(x))
    assert int((found != 0).sum()) <= k
    assert float((found - x).square().sum()) <= (1 - k / len(x)) * float(x.square().sum()) * (1 + 1e-12)


def test_entries_by_hand() -> None:
    codec, x = TopK(0.5), {"w": torch.tensor([[1.0, -3.0], [2.0, 0.5]])}
    wire = codec.encode(x, Context())
    # Places 1 and 2 of 4 in 2 bits each, lowest first: 0b10_01 = 9.
    assert {name: tensor.tolist() for name, tensor in wire.items()} == {
        "w|float32|2,2|values": [-3.0, 2.0], "w|float32|2,2|places": [9]
    }  # fmt: skip
    assert codec.decode(wire, Context())["w"].tolist() == [[0.0, -3.0], [2.0, 0.0]]


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12), st.sampled_from([0.2, 0.5, 0.9]))
def test_scaled_random_entries_are_unbiased(values: list[float], share: float) -> None:
    """The mean of n draws is within four standard errors, of variance (d/k − 1) ‖x‖² over all entries."""
    x, codec, n = torch.tensor(values, dtype=torch.float64), RandomK(share, feedback=False), 2000
    contexts = [Context(seed=seed) for seed in range(n)]
    draws = torch.stack([codec.decode(codec.encode({"x": x}, one), one)["x"] for one in contexts])
    k, d = math.ceil(share * len(x)), len(x)
    variance = (d / k - 1) * x.square()  # of each entry: x² d/k is the mean of its squares
    assert (draws.mean(0) - x).abs().le(4 * (variance / n).sqrt() + 1e-12).all()
    assert float((draws - x).square().sum(1).mean()) == pytest.approx(float(variance.sum()), rel=0.1, abs=1e-12)


def test_random_entries_under_error_feedback_are_not_scaled() -> None:
    x, codec = torch.arange(1.0, 11.0), RandomK(0.3)
    wire = codec.encode({"x": x}, Context(seed=1))
    assert set(wire["x|float32|10|values"].tolist()) <= set(x.tolist())
    found = codec.decode(wire, Context(seed=1))["x"]
    assert int((found == x).sum()) == 3
    assert int((found == 0).sum()) == 7


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"TopK\.share is .*; it must be"):
        TopK(share)


def test_places_of_a_round_are_all_clients() -> None:
    """Each client has a seed of its own beside the common one; the next round has another."""
    x, codec = torch.arange(1.0, 101.0), RandomK(0.1, common_seed=True)
    contexts = [Context(client_id=client_id, seed=client_id, common_seed=7) for client_id in range(3)]
    contexts.append(Context(seed=0, common_seed=8))
    found = [codec.decode(codec.encode({"x": x}, one), one)["x"] for one in contexts]
    assert all(torch.equal(one, found[0]) for one in found[:3])
    assert not torch.equal(found[3], found[0])
    sent = codec.places(100, contexts[1].generator("x", common=True))
    assert sorted(found[0].nonzero().flatten().tolist()) == sorted(sent.tolist())
    own = RandomK(0.1)
    assert not torch.equal(*(own.decode(own.encode({"x": x}, one), one)["x"] for one in contexts[:2]))
