"""FedRS against arithmetic.

Client 0 has 16 samples of class 0 and one of class 1, client 1 has one of class 1 and 16 of class 2; learning rate 1.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lit_fed import Classifier, objective_of
from lit_fed.errors import ConfigError
from lit_fed.losses import restricted_softmax
from lit_fed.methods import FedRS
from tests.methods.support import Labelled, Scores, run_quickstart
from tests.support import LeastSquares, assert_same, fit, saved_weights, weights


def test_the_loss_by_hand() -> None:
    # z = (0, 0, ln 4), the third class absent, α = ½: e⁰ : e⁰ : e^(½ ln 4) = 1 : 1 : 2. Its gradient is α·p = ½·½.
    logits, counts = torch.tensor([[0.0, 0.0, math.log(4)]], requires_grad=True), torch.tensor([3, 1, 0])
    loss = restricted_softmax(logits, torch.tensor([1]), counts, 0.5)
    assert loss.item() == pytest.approx(math.log(4))
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([0.25, -0.75, 0.25])


def test_one_round_by_hand(tmp_path: Path) -> None:
    # The softmax at w = 0 is (⅓, ⅓, ⅓). Means over the 17 samples, the absent class's times ½:
    #   client 0: w = −(⅓ − 16/17, ⅓ − 1/17, ½·⅓) = (31/51, −14/51, −1/6); client 1: w = (−1/6, −14/51, 31/51)
    #   mean: ((31/51 − 1/6)/2, −14/51, the first again)
    made = fit(tmp_path, Scores(), Labelled(), FedRS(0.5), max_rounds=1, protocols=[])
    outer = (31 / 51 - 1 / 6) / 2
    assert weights(made)["head.weight"].flatten().tolist() == pytest.approx([outer, -14 / 51, outer])


def test_with_alpha_1_it_is_fedavg(tmp_path: Path) -> None:
    fedrs = run_quickstart(tmp_path / "fedrs", "--algorithm", "FedRS", "--algorithm.alpha", "1")
    assert_same(saved_weights(fedrs), saved_weights(run_quickstart(tmp_path / "fedavg")))


def test_under_a_plain_trainer_no_class_is_restricted() -> None:
    module = Classifier("mlp", in_channels=1, input_shape=(2,))
    batch = torch.randn(3, 2), torch.tensor([0, 1, 2])
    loss = objective_of(module, FedRS()).training_step(batch, 0)
    torch.testing.assert_close(loss, F.cross_entropy(module(batch[0]), batch[1]))


def test_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.alpha is 2"):
        FedRS(alpha=2.0)
    with pytest.raises(ConfigError, match=r"algorithm FedRS needs logits: name the submodule .* as algorithm\.head"):
        fit(tmp_path, LeastSquares(), algorithm=FedRS())
