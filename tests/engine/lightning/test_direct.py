"""Tests of the short ways to torch's backward and step."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from lit_fed.engine.lightning import direct


def _loss_of(network: nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, 12).view(4, 3)
    loss: torch.Tensor = network(x).square().mean()
    return loss


def _grad(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_the_backward_below_torchs_own_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    _loss_of(network).backward()
    expected = [_grad(parameter).clone() for parameter in network.parameters()]
    network.zero_grad()
    direct.backward(_loss_of(network))
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        assert torch.equal(_grad(parameter), gradient)


def test_a_loss_that_is_a_parameter_itself_leaves_the_next_gradient_as_it_should_be() -> None:
    loss = nn.Parameter(torch.tensor(3.0))
    direct.backward(loss)
    _grad(loss).mul_(7)
    other = nn.Parameter(torch.tensor(2.0))
    direct.backward(other * 5)
    assert _grad(other) == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_loss_of_another_type_takes_torchs_own_way(dtype: torch.dtype) -> None:
    w = nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
    direct.backward((w * w).sum())
    assert _grad(w).tolist() == [2.0, 4.0]


def test_a_loss_without_a_gradient_is_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        direct.backward(torch.tensor(1.0))


def test_a_step_without_a_record_is_the_optimizers_step() -> None:
    w, v = (nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2))
    for parameter, step in ((w, direct.step), (v, torch.optim.Adam.step)):
        optimizer = torch.optim.Adam([parameter], lr=0.1)
        for _ in range(3):
            parameter.grad = parameter.detach() * 2
            step(optimizer)
    assert torch.equal(w, v)
    assert not torch.equal(w, torch.tensor([1.0, 2.0]))


def test_whoever_hooks_into_a_step_is_called() -> None:
    w = nn.Parameter(torch.zeros(1))
    optimizer, called = torch.optim.SGD([w], lr=0.1), list[str]()
    w.grad = torch.ones(1)
    before = optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    direct.step(optimizer)
    before.remove()
    after = register_optimizer_step_post_hook(lambda *_: called.append("after any"))
    direct.step(optimizer)
    after.remove()
    direct.step(optimizer)
    assert called == ["before", "after any"]


def test_a_scheduler_sees_the_steps_it_counts() -> None:
    w = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([w], lr=0.1)
    StepLR(optimizer, 1)  # puts a step of its own in the optimizer's place, which takes down that it was called
    w.grad = torch.ones(1)
    direct.step(optimizer)
    assert vars(optimizer)["_opt_called"]


def test_a_step_that_a_class_wraps_is_not_passed_over() -> None:
    called = list[int]()

    class Own(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def]  # as torch's own
            called.append(1)
            return super().step(closure)

    w = nn.Parameter(torch.zeros(1))
    w.grad = torch.ones(1)
    direct.step(Own([w], lr=0.1))
    assert called == [1]
    assert w == -0.1


def test_a_profiler_finds_the_steps_it_looks_for() -> None:
    w = nn.Parameter(torch.zeros(1))
    w.grad = torch.ones(1)
    optimizer = torch.optim.SGD([w], lr=0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        direct.step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events()}
