"""FedProx against arithmetic, and its reduction to FedAvg."""

from pathlib import Path

import pytest
import torch

from lit_fed.errors import ConfigError
from lit_fed.losses import proximal
from lit_fed.methods import FedProx
from tests.methods.support import ByHand
from tests.support import assert_same, fit, weights


def test_one_round_by_hand(tmp_path: Path) -> None:
    # Two full-batch steps, learning rate ½, μ = 1, from w = 0, where the proximal gradient is 0:
    #   client 0: w₁ = ½·2 = 1, then gradient (1 − 2) + 1·(1 − 0) = 0, so w₁ = 1
    #   client 1: w₂ = ½·4 = 2, then gradient (2 − 4) + 1·(2 − 0) = 0, so w₂ = 2
    #   mean with weights 1 and 3: (0.25, 1.5)
    made = fit(tmp_path, algorithm=FedProx(mu=1.0), max_rounds=1, local_epochs=2)
    assert weights(made)["network.weight"].tolist() == [[0.25, 1.5]]


def test_logged_terms_by_hand(tmp_path: Path) -> None:
    # Batch means over the two steps: the data term is 2, ½(1−2)² = 0.5 for client 0 and 8, ½(2−4)² = 2 for client 1;
    # the proximal term 0, ½ and 0, 2. Over clients with weights 1 and 3: (1.25 + 3·5)/4 and (0.25 + 3·1)/4.
    metrics = fit(tmp_path, algorithm=FedProx(mu=1.0), max_rounds=1, local_epochs=2).metrics
    assert metrics["train/task"] == pytest.approx(4.0625)
    assert metrics["train/prox"] == pytest.approx(0.8125)
    assert metrics["train/loss"] == pytest.approx(4.875)


def test_without_the_term_it_is_fedavg(tmp_path: Path) -> None:
    # The unregularised second steps give 1.5 and 3, so the mean is (1.5/4, 9/4).
    prox = fit(tmp_path, algorithm=FedProx(mu=0.0), max_rounds=1, local_epochs=2)
    assert weights(prox)["network.weight"].tolist() == [[0.375, 2.25]]
    assert_same(weights(prox), weights(fit(tmp_path, max_rounds=1, local_epochs=2)))


def test_gradient_of_the_term_is_the_distance() -> None:
    w = [torch.randn(3, 2, requires_grad=True), torch.randn(4, requires_grad=True)]
    anchors = [torch.randn(3, 2), torch.randn(4)]
    gradients = torch.autograd.grad(proximal(w, anchors), w)
    for gradient, parameter, anchor in zip(gradients, w, anchors, strict=True):
        torch.testing.assert_close(gradient, parameter.detach() - anchor)


def test_negative_mu() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.mu is -1"):
        FedProx(mu=-1.0)


def test_a_module_that_optimises_by_hand_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ByHand optimises by hand, and algorithm FedProx needs a loss that training"):
        fit(tmp_path, ByHand(), algorithm=FedProx())
