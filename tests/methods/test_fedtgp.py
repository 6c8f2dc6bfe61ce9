"""FedTGP's server against arithmetic and a loop over plain tensors; its clients are FedProto's."""

from math import exp, log
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lit_fed.errors import ConfigError
from lit_fed.methods import FedTGP
from lit_fed.methods.fedtgp import largest_gap, margin_loss
from tests.methods.test_fedproto import Numbers, task
from tests.support import fit


def test_the_margin_counts_against_the_true_class() -> None:
    # Distances 3 and 5 to the prototypes, label 0, margin 1: −log(e⁻⁴/(e⁻⁴ + e⁻⁵)).
    points, prototypes = torch.zeros(1, 2), torch.tensor([[3.0, 0.0], [3.0, 4.0]])
    loss = margin_loss(points, torch.tensor([0]), prototypes, 1.0)
    assert loss.item() == pytest.approx(log(1 + exp(-1)))
    at_one = margin_loss(points, torch.tensor([0]), torch.zeros(2, 2, requires_grad=True), 0.0)
    at_one.backward()  # a distance of 0 has a gradient


def test_the_largest_gap_is_between_means() -> None:
    # Means 1 (of 0 and 2), 3 and 8: nearest others at 2, 2 and 5.
    points = torch.tensor([[0.0], [2.0], [3.0], [8.0]])
    assert largest_gap(points, torch.tensor([0, 0, 1, 4])) == 5.0
    assert largest_gap(points, torch.tensor([2, 2, 2, 2])) == float("inf")


def test_a_round_is_sgd_on_the_clients_prototypes(tmp_path: Path) -> None:
    # Clients send 2 for class 0, 2 for class 1, and 4 for class 0 (test_fedproto.py): means 3 and 2, margin 1.
    method = FedTGP(server_epochs=3, server_lr=0.5)
    untrained = fit(tmp_path / "none", task(), Numbers(), FedTGP(server_epochs=1, server_lr=1e-30), max_rounds=1)
    made = fit(tmp_path / "made", task(), Numbers(), method, max_rounds=1)
    names = ["0.weight", "1.weight", "1.bias", "3.weight", "3.bias"]
    held = [untrained.run.federation.server["generator"][name].clone().requires_grad_() for name in names]
    points, labels = torch.tensor([[2.0], [2.0], [4.0]]), torch.tensor([0, 1, 0])

    def prototypes() -> torch.Tensor:
        e, w1, b1, w2, b2 = held
        return F.linear(F.linear(e, w1, b1).relu(), w2, b2)

    for _ in range(3):
        distances = (points - prototypes().T).abs() + F.one_hot(labels, 2)  # |C − P̂_c|, one number each, and the margin
        loss = (distances.gather(1, labels[:, None])[:, 0] + (-distances).logsumexp(1)).mean()
        for tensor, gradient in zip(held, torch.autograd.grad(loss, held), strict=True):
            tensor.data -= 0.5 * gradient
    torch.testing.assert_close(made.run.federation.server["prototypes"], prototypes().detach())
    assert made.metrics["server/margin"] == 1.0
    assert made.metrics["server/prototype_loss"] == pytest.approx(loss.item())


def test_wrong_settings() -> None:
    for name in ("lam", "margin"):
        with pytest.raises(ConfigError, match=rf"algorithm\.{name} is -1"):
            FedTGP(**{name: -1.0})  # type: ignore[arg-type]
    for name in ("server_epochs", "server_batch_size", "server_lr"):
        with pytest.raises(ConfigError, match=rf"algorithm\.{name} is 0"):
            FedTGP(**{name: 0})
