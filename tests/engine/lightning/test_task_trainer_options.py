"""Clipping of one client's gradients, and of a group's, is torch's own."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lit_fed.engine.lightning.task_trainer import GradientOptions, clip_gradients

SEEDS = st.integers(0, 2**31)


def gradients(seed: int, count: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(count, *shape, generator=made) for shape in ((3,), (2, 5), ())]


@given(SEEDS, st.sampled_from([1e-3, 0.5, 4.0, 1e3]), st.sampled_from(["norm", "value"]), st.integers(1, 4))
def test_each_client_is_clipped_as_torch_clips_it_alone(seed: int, clip_val: float, how: str, count: int) -> None:
    stacks = gradients(seed, count)
    expected = []
    for idx in range(count):
        parameters = [nn.Parameter(torch.zeros_like(stack[idx])) for stack in stacks]
        for parameter, stack in zip(parameters, stacks, strict=True):
            parameter.grad = stack[idx].clone()
        if how == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)
        else:
            torch.nn.utils.clip_grad_value_(parameters, clip_val)
        expected.append([parameter.grad for parameter in parameters])
    GradientOptions(clip_val, how).clip(stacks)  # type: ignore[arg-type]  # one of the two words
    for idx, own in enumerate(expected):
        for stack, gradient in zip(stacks, own, strict=True):
            torch.testing.assert_close(stack[idx], gradient, rtol=1e-6, atol=0)  # norms may round in another order


def test_an_optimizers_gradients_are_clipped_in_place_and_missing_ones_left_out() -> None:
    # ‖(3, 4)‖ = 5, so that the factor is 1/5
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    first.grad = torch.tensor([3.0, 4.0])
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    clip_gradients(optimizer, GradientOptions(1.0))
    torch.testing.assert_close(first.grad, torch.tensor([0.6, 0.8]))
    assert second.grad is None
    clip_gradients(optimizer, GradientOptions(None))
    torch.testing.assert_close(first.grad, torch.tensor([0.6, 0.8]))
