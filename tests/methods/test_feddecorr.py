"""FedDecorr against arithmetic, over any method and in groups."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.errors import ConfigError
from lit_fed.losses import decorrelation
from lit_fed.methods import FedAvg, FedDecorr
from tests.engine.vectorized.test_executor import assert_close, federate, pads_to
from tests.methods.support import run_quickstart
from tests.support import LeastSquares, assert_same, fit, saved_weights


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([1.0, -1.0, -1.0, 1.0], 1 / 2),  # uncorrelated with the first: ‖I‖²/2² = 2/4
        ([5.0, 3.0, 5.0, 3.0], 1.0),  # the first, shifted: four ones
        # Centred (½, ½, ½, −3/2), variance ¾; covariance with the first ½, so the correlation is ½/√¾, its square ⅓.
        ([1.0, 1.0, 1.0, -1.0], (2 + 2 / 3) / 4),
        ([2.0, 2.0, 2.0, 2.0], 1 / 4),  # constant: it correlates with nothing, not even with itself
    ],
)
def test_the_term_by_hand(second: list[float], expected: float) -> None:
    features = torch.tensor([[1.0, -1.0, 1.0, -1.0], second]).T.requires_grad_()
    term = decorrelation(features)
    assert term.item() == pytest.approx(expected, abs=1e-6)
    term.backward()
    assert features.grad is not None
    assert features.grad.isfinite().all()


def test_one_sample_has_no_correlation() -> None:
    assert decorrelation(torch.randn(1, 5)).item() == 0.0


@pytest.mark.parametrize("method", ["FedAvg", "Scaffold", "FedPer", "Ditto"])
def test_without_weight_it_is_the_method(tmp_path: Path, method: str) -> None:
    of = "--algorithm.regularizer"
    without, plain, term = (
        saved_weights(run_quickstart(tmp_path / name, "--algorithm", method, *options))
        for name, options in (
            ("without", (of, "FedDecorr", f"{of}.weight", "0")),
            ("plain", ()),
            ("term", (of, "FedDecorr")),
        )
    )
    assert_same(without, plain)
    assert any(not torch.equal(term[name], plain[name]) for name in plain)


def test_in_groups_it_is_one_client_after_the_other(tmp_path: Path) -> None:
    def method() -> Any:
        return FedAvg(regularizer=FedDecorr(0.1))

    # A dimension of small variance in a small batch amplifies rounding, more than 32 bits carry on every processor.
    alone, grouped = (
        federate(tmp_path / how, how, method(), precision="64-true") for how in ("sequential", "vectorized")
    )
    assert pads_to(grouped) == 0, "a correlation over a batch is not a mean over its samples"
    assert_close(alone, grouped)


def test_a_task_without_features_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"regularizer FedDecorr needs features: name the submodule .* as algorithm"):
        fit(tmp_path, LeastSquares(), algorithm=FedAvg(regularizer=FedDecorr()))
