"""FedLC against arithmetic.

Client 0 has 16 samples of class 0 and one of class 1, client 1 has one of class 1 and 16 of class 2; learning rate 1.
With τ = 2 ln 2 the margins are 2 ln 2 · 16^(−¼) = ln 2 and 2 ln 2 · 1 = ln 4, and infinite for the absent class.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lit_fed import Classifier, objective_of
from lit_fed.errors import ConfigError
from lit_fed.losses import calibrated_cross_entropy
from lit_fed.methods import FedLC
from tests.methods.support import Labelled, Scores, run_quickstart
from tests.support import LeastSquares, assert_same, fit, saved_weights, weights

TAU = 2 * math.log(2)


def test_the_loss_by_hand() -> None:
    # Equal logits, counts 16 and 1: e^(−ln 2) : e^(−ln 4) = 2 : 1; the absent class has no part, whatever its logit.
    logits, counts = torch.tensor([[0.0, 0.0, 9.0]], requires_grad=True), torch.tensor([16, 1, 0])
    for label, expected in ((0, math.log(3 / 2)), (1, math.log(3))):
        loss = calibrated_cross_entropy(logits, torch.tensor([label]), counts, TAU)
        assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([2 / 3, -2 / 3, 0.0])
    assert calibrated_cross_entropy(logits, torch.tensor([2]), counts, TAU).isinf()


def test_one_round_by_hand(tmp_path: Path) -> None:
    # Both clients' softmax at w = 0 is 2/3 for their common class and 1/3 for class 1. Means over their 17 samples:
    #   client 0: (2/3 − 16/17, 1/3 − 1/17, 0) → w = (14/51, −14/51, 0); client 1: w = (0, −14/51, 14/51)
    #   mean: (7/51, −14/51, 7/51)
    made = fit(tmp_path, Scores(), Labelled(), FedLC(TAU), max_rounds=1, protocols=[])
    assert weights(made)["head.weight"].flatten().tolist() == pytest.approx([7 / 51, -14 / 51, 7 / 51])


def test_with_tau_0_it_is_fedavg(tmp_path: Path) -> None:
    fedlc = run_quickstart(tmp_path / "fedlc", "--algorithm", "FedLC", "--algorithm.tau", "0")
    assert_same(saved_weights(fedlc), saved_weights(run_quickstart(tmp_path / "fedavg")))


def test_under_a_plain_trainer_the_margins_are_equal() -> None:
    module = Classifier("mlp", in_channels=1, input_shape=(2,))
    batch = torch.randn(3, 2), torch.tensor([0, 1, 2])
    loss = objective_of(module, FedLC()).training_step(batch, 0)
    torch.testing.assert_close(loss, F.cross_entropy(module(batch[0]), batch[1]))


def test_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.tau is -1"):
        FedLC(tau=-1.0)
    with pytest.raises(ConfigError, match=r"algorithm FedLC needs logits: name the submodule .* as algorithm\.head"):
        fit(tmp_path, LeastSquares(), algorithm=FedLC())
