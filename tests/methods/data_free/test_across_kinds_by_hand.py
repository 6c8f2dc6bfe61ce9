"""Three widths and three architectures: a round by hand, and the settings in which it is FedAvg."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor

from lit_fed.methods import FedAvg, FedGen, HFedCKD
from tests.methods.data_free.support import Halves, three_architectures, three_widths
from tests.methods.support import Rota
from tests.support import Points, assert_same, fit, weights

SMALL: dict[str, Any] = {"noise_size": 3, "generator_steps": 1, "generator_batch_size": 6}
METHODS: dict[str, Callable[[], Any]] = {
    "fedgen": lambda: FedGen(**SMALL, hidden=4),
    "hfedckd": lambda: HFedCKD(
        **SMALL, generator="features", width=4, pseudo_size=8, distillation_steps=0, weighting="samples"
    ),
}
OFF: dict[str, Callable[[], Any]] = {
    "fedgen": lambda: FedGen(alpha=0.0, beta=0.0, noise_size=3, hidden=4, generator_steps=0),
    "hfedckd": lambda: HFedCKD(
        generator="features", width=4, ipwd=False, contrast=False, generator_steps=0, weighting="samples"
    ),
}
KINDS: dict[str, Callable[[], dict[str, LightningModule]]] = {
    "widths": three_widths,
    "architectures": three_architectures,
}
MEET = {
    "widths": ["head.weight", "head.bias", "body.2.bias"],  # (5, 2), (5,), and (2,) of the last layer of each width
    "architectures": ["head.weight", "head.bias"],
}
EACH_METHOD = pytest.mark.parametrize("method", METHODS)
EACH_KINDS = pytest.mark.parametrize("kinds", KINDS)


def stepped(task: LightningModule, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """A network after one step of gradient descent at learning rate ½ on its cross-entropy."""
    parameters = dict(task.named_parameters())
    gradients = torch.autograd.grad(F.cross_entropy(task(x), y), list(parameters.values()))
    return {
        name: (tensor - 0.5 * gradient).detach()
        for (name, tensor), gradient in zip(parameters.items(), gradients, strict=True)
    }


@EACH_KINDS
@EACH_METHOD
def test_a_round_by_hand(method: str, kinds: str, tmp_path: Path) -> None:
    # Client 0 has one sample (1, 0) of class 2, client 1 three of (0, 1) and class 4, client 2 is as client 0: each has
    # a kind of its own and does one step on all its samples. In the first round the methods add nothing to the loss.
    # What meets is (1·a + 3·b + 1·c)/5, the rest is the client's own.
    tasks = KINDS[kinds]()
    own = [
        stepped(task, *sample)
        for task, sample in zip(
            tasks.values(),
            [
                (torch.tensor([[1.0, 0.0]]), torch.tensor([2])),
                (torch.tensor([[0.0, 1.0]] * 3), torch.tensor([4, 4, 4])),
                (torch.tensor([[1.0, 0.0]]), torch.tensor([2])),
            ],
            strict=True,
        )
    ]
    server = fit(
        tmp_path, deepcopy(tasks), Points(num_clients=3), METHODS[method](), max_rounds=1
    ).run.federation.server
    for kind, expected in zip(tasks, own, strict=True):
        for name, tensor in server["models"][kind].items():
            met = (own[0][name] + 3 * own[1][name] + own[2][name]) / 5 if name in MEET[kinds] else expected[name]
            torch.testing.assert_close(tensor, met, rtol=1e-5, atol=1e-6)


@EACH_KINDS
@EACH_METHOD
def test_a_round_of_one_kind_alone_is_fedavgs(method: str, kinds: str, tmp_path: Path) -> None:
    # Client 0 is alone in round 0: its kind's global network is what FedAvg makes of it, and of the others' networks
    # what does not meet it stays as it was.
    tasks = KINDS[kinds]()
    first, *others = tasks
    before = {kind: {n: t.clone() for n, t in tasks[kind].state_dict().items()} for kind in others}
    fedavg = fit(
        tmp_path / "fedavg", deepcopy(tasks[first]), Points(num_clients=3), FedAvg(), max_rounds=1, participation=Rota()
    )
    made = fit(
        tmp_path / "kinds", tasks, Points(num_clients=3), OFF[method](), max_rounds=1, participation=Rota()
    ).run.federation.server["models"]
    assert_same(made[first], weights(fedavg))
    for kind in others:
        expected = {n: made[first][n] if n in MEET[kinds] else t for n, t in before[kind].items()}
        assert_same(made[kind], expected)


@EACH_METHOD
def test_three_kinds_of_one_network_are_fedavg(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Halves()
    fedavg = fit(tmp_path / "fedavg", deepcopy(network), Points(num_clients=3), FedAvg(), max_rounds=3)
    tasks: dict[str, LightningModule] = {kind: deepcopy(network) for kind in ("one", "another", "third")}
    made = fit(tmp_path / "kinds", tasks, Points(num_clients=3), OFF[method](), max_rounds=3).run.federation.server
    for kind in tasks:
        assert_same(made["models"][kind], weights(fedavg))
