"""Training on the server: by hand, seeded, and without a trace in the task it borrows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_fed.engine.clients.server_training import ServerLoop
from lit_fed.engine.lightning.objective import Objective
from lit_fed.errors import ConfigError
from tests.support import LeastSquares, Points, assert_same, fit

BATCHES = [(torch.tensor([[1.0, 0.0]]), torch.tensor([2.0])), (torch.eye(2), torch.tensor([2.0, 4.0]))]


def own_loss(task: Objective, batch: Any) -> Tensor:
    loss = task.run(batch).loss
    assert loss is not None
    return loss


@contextmanager
def server(folder: Path, task: LeastSquares | None = None) -> Iterator[ServerLoop]:
    federation = fit(folder, task or LeastSquares(), Points(sizes=(2, 3)), max_rounds=1).run.federation
    with federation.session.at_work("fit"):
        yield ServerLoop(federation.fabric, federation.loops)


def train(loop: ServerLoop, batches: Any = BATCHES, epochs: int = 1, **kwargs: Any) -> tuple[Any, float]:
    """Train w from 0."""
    begin = {"network.weight": torch.zeros(1, 2)}
    trained, loss = loop.train("model", begin, batches, own_loss, epochs=epochs, seed=(0, "test"), **kwargs)
    return trained["network.weight"].tolist(), loss


def test_an_epoch_by_hand(tmp_path: Path) -> None:
    with server(tmp_path) as loop:
        weight, loss = train(loop)
    # w = 0. First batch: loss ½·2² = 2, gradient −2·(1, 0), a step of ½: w = (1, 0).
    # Second: losses ½·1² and ½·4², mean 4.25; gradient ((−1, 0) + (0, −4))/2, w = (1, 0) + (¼, 1) = (1.25, 1).
    # Mean over the three samples: (2 + 2·4.25)/3 = 3.5.
    assert weight == [[1.25, 1.0]]
    assert loss == 3.5


def test_another_optimizer_may_be_given(tmp_path: Path) -> None:
    with server(tmp_path) as loop:
        weight, _ = train(loop, BATCHES[:1], 2, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    assert weight == [[2.0, 0.0]]  # steps of 1 along −2·(1, 0), then along 0


class Scheduled(LeastSquares):
    """Its schedule begins at a tenth of the learning rate."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1)]


def test_the_tasks_own_optimizer_is_without_its_schedule(tmp_path: Path) -> None:
    with server(tmp_path, Scheduled()) as loop:
        weight, _ = train(loop, BATCHES[:1])
    assert weight == [[1.0, 0.0]]


class Mixed(LeastSquares):
    """Batch norm that stays in evaluation mode, and dropout; it logs."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.network = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train/mine", loss)
        return loss


def test_the_task_comes_back_as_it_was_and_the_seed_decides(tmp_path: Path) -> None:
    task, batches = Mixed(), [BATCHES[1]] * 3
    with server(tmp_path, task) as loop:
        model = loop.loops["model"].model
        task.train()
        task.network[1].eval()
        model.set_trainable({"network.3.weight"})
        before, modes = model.copy(), [module.training for module in task.modules()]
        begin = {name: tensor + 1 for name, tensor in before.items()}
        one, again, other = (
            loop.train("model", begin, batches, own_loss, epochs=2, seed=(0, seed))[0] for seed in ("a", "a", "b")
        )
        loop.predict("model", one, batches)
        assert_same(model.copy(), before)
        assert [module.training for module in task.modules()] == modes
        assert [name for name, one in task.named_parameters() if one.requires_grad] == ["network.3.weight"]
        assert all(parameter.grad is None for parameter in task.parameters())
    assert all(tensor.isfinite().all() for tensor in one.values())
    assert_same(one, again)
    assert not torch.equal(one["network.0.weight"], other["network.0.weight"]), "dropout does not depend on the seed"
    assert int(one["network.1.num_batches_tracked"]) == int(begin["network.1.num_batches_tracked"]) + 6
    assert not torch.equal(one["network.0.weight"], begin["network.0.weight"]), "what did not train before trains here"


def test_predictions_are_of_the_given_tensors_in_evaluation_mode(tmp_path: Path) -> None:
    with server(tmp_path) as loop:
        found = loop.predict("model", {"network.weight": torch.tensor([[3.0, 5.0]])}, BATCHES)
    assert found.tolist() == [[3.0], [3.0], [5.0]]  # w·x for (1, 0), (1, 0) and (0, 1)


class TwoOptimizers(LeastSquares):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.2)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]  # a list of two
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


def test_which_of_several_optimizers_is_not_guessed(tmp_path: Path) -> None:
    message = "model TwoOptimizers has 2 optimizers; training on the server needs exactly one"
    with server(tmp_path, TwoOptimizers()) as loop, pytest.raises(ConfigError, match=message):
        train(loop)


def test_a_network_of_the_servers_own_learns_by_hand(tmp_path: Path) -> None:
    # g(x) = a·x from a = 1, terms ½(g − 2)² and a of a batch: at x = 1 gradients −1 and 1, at x = 2 by a = 1 0 and 1.
    # SGD with rate ¼: a = 1, then 1 − ¼·(2·(2 − 2) + 1) = ¾. Means over 1 + 1 samples: ½·(½ + 0) = ¼ and ½·(1 + 1).
    own = nn.Linear(1, 1, bias=False)

    def terms(x: Tensor) -> dict[str, Tensor]:
        return {"far": 0.5 * (own(x) - 2).square().mean(), "size": own.weight.sum()}

    begin = {"weight": torch.ones(1, 1)}
    with server(tmp_path) as loop:
        before = {kind: one.model.copy() for kind, one in loop.loops.items()}
        learnt, means = loop.learn(
            own, begin, [torch.ones(1, 1), 2 * torch.ones(1, 1)], terms, seed=(0, "test"),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.25),
        )  # fmt: skip
        for kind, one in loop.loops.items():
            assert_same(one.model.copy(), before[kind])
    assert learnt["weight"].tolist() == [[0.75]]
    assert begin["weight"].tolist() == [[1.0]]
    assert means == {"far": 0.25, "size": 1.0}


def test_a_kinds_network_is_differentiable_in_what_it_sees_and_stays_as_it_is(tmp_path: Path) -> None:
    # f(x) = 3x₁ − x₂
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    with server(tmp_path) as loop:
        before = loop.loops["model"].model.copy()
        found = loop.forward("model", {"network.weight": torch.tensor([[3.0, -1.0]])}, x)
        assert_same(loop.loops["model"].model.copy(), before)
    assert found.item() == 1.0
    assert torch.autograd.grad(found.sum(), x)[0].tolist() == [[3.0, -1.0]]


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc's malloc.h; ``hblks`` is the number of blocks mapped one by one."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def test_large_tensors_are_not_mapped_anew_after_the_server_has_trained(tmp_path: Path) -> None:
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("needs glibc 2.33")
    mallinfo2.restype = _Mallinfo2
    with server(tmp_path) as loop:
        train(loop)
    before = mallinfo2().hblks
    large = torch.empty(10 * 2**20)  # 40 MiB: more than the 32 that glibc reuses by default, less than a thread's arena
    assert mallinfo2().hblks == before
    assert large.numel() == 10 * 2**20
