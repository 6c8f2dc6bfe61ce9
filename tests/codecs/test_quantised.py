"""Quantised codecs: unbiased, within the published bounds, and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_fed.codecs import QSGD, Codec, Context, Int8, SignSGD
from lit_fed.errors import ConfigError

DRAWS = 1500
VALUES = st.lists(st.floats(-10, 10).filter(lambda value: value == 0 or abs(value) > 1e-6), min_size=2, max_size=24)


def drawn(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """Decoded copies of a tensor, (draws, …)."""
    contexts = [Context(seed=seed) for seed in range(DRAWS)]
    return torch.stack([codec.decode(codec.encode({"x": x}, one), one)["x"] for one in contexts])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(VALUES, st.sampled_from([1, 2, 7]))
def test_qsgd_is_unbiased_within_its_variance(values: list[float], s: int) -> None:
    """E Q(v) = v within four standard errors; E ‖Q(v) − v‖² ≤ min(d/s², √d/s) ‖v‖² (Alistarh et al., Lemma 3.1)."""
    x = torch.tensor(values, dtype=torch.float64)
    found, norm, d = drawn(QSGD(levels=s), x), float(x.norm()), len(x)
    # A value between two levels, norm/s apart, takes the upper with probability p: variance p (1 − p) norm² / s².
    p = (x.abs() / norm * s).frac() if norm else torch.zeros(d)
    error = (p * (1 - p)).sqrt() * norm / s / math.sqrt(DRAWS)
    assert (found.mean(0) - x).abs().le(4 * error + 1e-9).all()
    bound = min(d / s**2, math.sqrt(d) / s) * norm**2
    assert float((found - x).square().sum(1).mean()) <= bound * 1.05 + 1e-12


@settings(max_examples=8, deadline=None, derandomize=True)
@given(VALUES, st.sampled_from([4, 8]))
def test_int8_is_unbiased_and_off_by_less_than_a_step(values: list[float], bits: int) -> None:
    half = len(values) // 2 * 2
    x = torch.tensor(values[:half], dtype=torch.float64).reshape(2, -1)
    found = drawn(Int8(bits=bits), x)
    step = x.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert (found - x).abs().le(step * (1 + 1e-9)).all()
    p = (x.abs() / step).nan_to_num(0).frac()
    assert (found.mean(0) - x).abs().le(4 * (p * (1 - p)).sqrt() * step / math.sqrt(DRAWS) + 1e-9).all()


def test_levels_by_hand() -> None:
    """Norm 5 and s = 5: 3 and 4 are levels, so that nothing is drawn. Codes are 5 + 3 and 5 − 4, of 4 bits each."""
    codec = QSGD(levels=5)
    (wire,) = codec.encode({"v": torch.tensor([3.0, -4.0])}, Context()).values()
    assert wire[:4].view(torch.float32).item() == 5.0
    assert wire[4:].tolist() == [8 + 16 * 1]
    assert codec.decode({"v|float32|2|codes": wire}, Context())["v"].tolist() == [3.0, -4.0]


def test_each_bucket_has_its_norm_and_each_channel_its_largest_value() -> None:
    x = torch.tensor([[3.0, -4.0, 0.0], [0.0, 300.0, -400.0]])
    assert QSGD(levels=5, bucket=3).decode(QSGD(levels=5, bucket=3).encode({"x": x}, Context()), Context())[
        "x"
    ].tolist() == [[3.0, -4.0, 0.0], [0.0, 300.0, -400.0]]
    rows = torch.tensor([[127.0, -1.0], [1270.0, -10.0]])
    assert Int8().decode(Int8().encode({"x": rows}, Context()), Context())["x"].tolist() == rows.tolist()


def test_signs_by_hand() -> None:
    """The 1-norm of 1, 3, 0, 4 is 8, and so their mean is 2; bits 1 and 3 are set: 10."""
    (wire,) = SignSGD().encode({"v": torch.tensor([1.0, -3.0, 0.0, -4.0])}, Context()).values()
    assert (wire[:4].view(torch.float32).item(), wire[4:].tolist()) == (8.0, [10])
    assert SignSGD().decode({"v|float32|4|codes": wire}, Context())["v"].tolist() == [2.0, -2.0, 2.0, -2.0]


def test_tiny_and_half_precision_values_keep_their_size() -> None:
    tiny = torch.full((16,), 1e-30)
    assert QSGD().decode(QSGD().encode({"x": tiny}, Context()), Context())["x"].max().item() > 0
    half = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float16)
    found = Int8().decode(Int8().encode({"x": half}, Context()), Context())["x"]
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, half, rtol=0, atol=4 / 127 + 2e-3)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: QSGD(levels=0), r"QSGD\.levels is 0; it must be at least 1 and at most 32768"),
        (lambda: QSGD(bucket=0), r"QSGD\.bucket is 0; it must be at least 1"),
        (lambda: Int8(bits=3), r"Int8\.bits is 3; it must be"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_are_refused(make: Callable[[], Codec], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()
