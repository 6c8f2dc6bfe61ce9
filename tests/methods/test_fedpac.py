"""FedPAC against arithmetic: features f(x) = w·x from w = 1, two logits Wx from W = 0, learning rate ¼.

Client 0 has x = 1 and 3 of class 0 and x = 2 of class 1, client 1 has x = 4 of class 0, as in `test_fedproto`.
"""

from collections import OrderedDict
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lit_fed import Classifier
from lit_fed.data import ClassesPerClient, Digits
from lit_fed.errors import ConfigError
from lit_fed.methods import FedPAC, FedRep
from lit_fed.methods.fedpac import mixture
from lit_fed.protocols import ClientTest, GlobalTest
from tests.methods.test_fedproto import Numbers
from tests.support import LeastSquares, Points, fit, rows


def sigmoid(z: float) -> float:
    return 1 / (1 + exp(-z))


def task(lr: float = 0.25) -> Classifier:
    body, head = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)
    nn.init.ones_(body.weight)
    nn.init.zeros_(head.weight)
    network = nn.Sequential(OrderedDict(body=body, head=head))
    return Classifier(network, lambda parameters: torch.optim.SGD(parameters, lr=lr))


def test_a_round_by_hand(tmp_path: Path) -> None:
    made = fit(tmp_path, task(), Numbers(), FedPAC(head="network.head"), max_rounds=1, protocols=[ClientTest()])
    server = made.run.federation.server
    # The head, all of whose probabilities are ½: client 0: ¼ · (½·1 + ½·3 − ½·2)/3 = 1/12 for class 0, −1/12 for
    # class 1; client 1: ¼ · ½ · 4 = ½ and −½. Its margin is u·x with u = 1/6, and 1.
    # The body: client 0 along the mean of (1 − σ(u))u·1, (1 − σ(3u))u·3 and −σ(2u)u·2; client 1 along (1 − σ(4))·4.
    u = 1 / 6
    w_0 = 1 + ((1 - sigmoid(u)) * u + (1 - sigmoid(3 * u)) * 3 * u - sigmoid(2 * u) * 2 * u) / 12
    w_1 = 1 + (1 - sigmoid(4)) * 4 / 4
    assert server["model"]["network.body.weight"].item() == pytest.approx((3 * w_0 + w_1) / 4)
    # The centres, of class 0 over x = 1, 3 and 4, of class 1 over x = 2.
    assert server["prototypes"].flatten().tolist() == pytest.approx([(4 * w_0 + 4 * w_1) / 3, 2 * w_0])
    # h_0 = (4/3, 2/3), V_0 = (14/3 − 20/9)/3 = 22/27, and h_1 = (4, 0), V_1 = 0; D = ‖h_0 − h_1‖² = 68/9. Client 0:
    # α²·V_0 + (1 − α)²·D is least at α = D/(V_0 + D) = 204/226; client 1 takes its own.
    alpha = 204 / 226
    assert server["heads"]["network.head.weight"].flatten().tolist() == pytest.approx(
        [alpha / 12 + (1 - alpha) / 2, -alpha / 12 - (1 - alpha) / 2, 0.5, -0.5]
    )
    assert made.metrics["server/own_head"] == pytest.approx((alpha + 1) / 2)
    # Down w and two numbers of the head; up these, 2 + 1 of h and V, 2 + 2 of sums and counts.
    assert (made.metrics["comm/downlink_bytes"], made.metrics["comm/uplink_bytes"]) == (2 * 3 * 4, 2 * 10 * 4)


def test_the_features_are_drawn_to_the_centres(tmp_path: Path) -> None:
    # At (nearly) no learning rate f(x) = x, with centres 8/3 of x = 1, 3, 4 and 2: client 0: ((5/3)² + (1/3)² + 0)/3,
    # client 1: (4/3)²; over the samples of both (26/9 + 16/9)/4 = 7/6. λ = 2.
    made = fit(tmp_path, task(1e-9), Numbers(), FedPAC(2.0, head="network.head"), max_rounds=2)
    table = rows(made.log_dir / "metrics.csv")
    assert not table[0].get("train/prototypes")
    assert float(table[1]["train/prototypes"]) == pytest.approx(2 * 7 / 6, rel=1e-5)
    assert made.metrics["comm/downlink_bytes"] == 2 * (3 + 4) * 4


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**31), st.sampled_from([0.0, 1e-6, 1.0]))
@settings(max_examples=200, deadline=None)
def test_the_mixture_fulfils_the_conditions_of_a_minimum(m: int, d: int, seed: int, scale: float) -> None:
    random = np.random.default_rng(seed)
    away, variances = random.normal(size=(m, d)), scale * random.random(m)
    away -= away[random.integers(m)]  # as of one of them
    alpha = mixture(away, variances)
    assert alpha.min() >= 0
    assert alpha.sum() == pytest.approx(1)
    gradient = (np.diag(variances) + away @ away.T) @ alpha
    least = alpha @ gradient  # the multiplier of the sum
    tolerance = 1e-7 * (1 + np.square(away).sum())
    assert (gradient >= least - tolerance).all()
    assert (np.abs(gradient - least)[alpha > 1e-9] <= tolerance).all()


def test_the_program_is_that_of_the_authors_code() -> None:
    """Its matrix, as ``get_head_agg_weight`` of ``JianXu95/FedPAC`` 7cf08f3e22ac fills it, entry by entry."""
    random = np.random.default_rng(0)
    h, variances = random.normal(size=(4, 3, 2)), random.random(4)
    for i in range(4):
        matrix = np.diag(variances)
        for j in range(4):
            for other in range(4):
                matrix[j, other] += sum((h[i, k] - h[j, k]) @ (h[i, k] - h[other, k]) for k in range(3))
        alpha = mixture((h - h[i]).reshape(4, -1), variances)
        points = random.dirichlet(np.ones(4), 20_000)
        assert alpha @ matrix @ alpha <= np.einsum("ij,jk,ik->i", points, matrix, points).min() + 1e-12


def test_where_every_client_has_one_sample_it_is_fedrep(tmp_path: Path) -> None:
    # One sample: V = E‖f‖² − ‖f‖² = 0, so that each client's own head is the best mixture. λ = 0, one epoch each.
    def net() -> Classifier:
        torch.manual_seed(0)
        return Classifier("mlp", lambda p: torch.optim.SGD(p, lr=0.1), num_classes=5, input_shape=(2,))

    data = {"one": Points(4, sizes=(1, 1)), "other": Points(4, sizes=(1, 1))}
    one = fit(tmp_path / "one", net(), data["one"], FedPAC(lam=0.0), max_rounds=3)
    other = fit(tmp_path / "other", net(), data["other"], FedRep(), max_rounds=3)
    found, expected = (made.run.federation for made in (one, other))
    for client_id in range(4):
        kept = expected.store.get(client_id)
        assert kept is not None
        for name, tensor in kept.items():
            torch.testing.assert_close(found.server["heads"][name][client_id], tensor, rtol=1e-6, atol=1e-7)
    for name, tensor in expected.server["model"].items():
        if name not in found.server["heads"]:
            torch.testing.assert_close(found.server["model"][name], tensor, rtol=1e-6, atol=1e-7)


def test_in_groups_it_is_one_client_after_the_other(tmp_path: Path) -> None:
    def run(executor: str) -> Any:
        torch.manual_seed(0)
        net = Classifier("mlp", lambda p: torch.optim.SGD(p, lr=0.1), input_shape=(1, 8, 8))
        data = Digits(num_clients=4, partition=ClassesPerClient(2), max_train_samples=200, batch_size=16)
        both = [ClientTest(), GlobalTest()]
        return fit(tmp_path / executor, net, data, FedPAC(), executor=executor, max_rounds=3, protocols=both)

    alone, grouped = run("sequential"), run("vectorized")
    for name, stack in alone.run.federation.server["heads"].items():
        torch.testing.assert_close(grouped.run.federation.server["heads"][name], stack, rtol=1e-3, atol=1e-5)
    assert alone.metrics["clients/loss_mean"] == pytest.approx(grouped.metrics["clients/loss_mean"], rel=1e-3)
    assert alone.metrics["clients/loss_mean"] < alone.metrics["global/loss"]


@pytest.mark.parametrize("settings", [{"lam": -1.0}, {"head_epochs": 0}, {"head_lr": 0.0}])
def test_wrong_settings(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=rf"algorithm\.{name} is"):
        FedPAC(**settings)


def test_it_needs_labels_and_a_head(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FedPAC"):
        fit(tmp_path, LeastSquares(), algorithm=FedPAC())
