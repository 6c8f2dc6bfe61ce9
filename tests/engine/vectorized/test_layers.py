"""Layers of a group: the values and gradients of ``F.linear`` alone, client by client."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fed.engine.vectorized.layers import GroupLayers

CLIENTS, ROWS, INPUTS, OUTPUTS = 3, 4, 6, 5


def step(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A loss of two layers, of which the second has the first one's weights and no bias."""
    return F.linear(F.linear(x, weight, bias).tanh(), weight.mT.contiguous()).square().mean()


def by_sample(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.vmap(step, in_dims=(0, None, None))(x.unsqueeze(-2), weight, bias).mean()


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]


@pytest.mark.parametrize("run", [step, by_sample])
@pytest.mark.parametrize("shape", [(ROWS, INPUTS), (2, ROWS, INPUTS)], ids=str)
@pytest.mark.parametrize("shared", [None, "weight", "x"])
def test_a_group_has_every_clients_own_values_and_gradients(
    run: Callable[..., Tensor], shape: tuple[int, ...], shared: str | None
) -> None:
    torch.manual_seed(0)
    made: dict[str, Tensor] = {}
    for name, own in (("x", shape), ("weight", (OUTPUTS, INPUTS)), ("bias", (OUTPUTS,))):
        full = own if name == shared else (CLIENTS, *own)
        made[name] = torch.randn(full, dtype=torch.float64, requires_grad=True)
    x, weight, bias = made.values()
    dims = tuple(None if name == shared else 0 for name in made)
    with GroupLayers(by_sample=run is by_sample):
        grouped = torch.vmap(run, in_dims=dims)(x, weight, bias)

    def of(name: str, client: int) -> Tensor:
        return made[name] if name == shared else made[name][client]

    alone = torch.stack([run(of("x", one), of("weight", one), of("bias", one)) for one in range(CLIENTS)])
    for found, expected in zip(gradients(grouped, x, weight, bias), gradients(alone, x, weight, bias), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_layer_without_a_bias_and_one_that_does_not_train() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(CLIENTS, ROWS, INPUTS, requires_grad=True), torch.randn(CLIENTS, OUTPUTS, INPUTS)
    with GroupLayers():
        found = torch.vmap(F.linear)(x, weight)
    expected = torch.stack([F.linear(own, of) for own, of in zip(x, weight, strict=True)])
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(found, x), gradients(expected, x), strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_and_a_single_vector_are_left_to_torch() -> None:
    weight, x = torch.randn(CLIENTS, OUTPUTS, INPUTS), torch.randn(CLIENTS, INPUTS)
    bias = torch.randn(CLIENTS, OUTPUTS)
    with GroupLayers(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.vmap(F.linear)(x.unsqueeze(1), weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.vmap(F.linear)(x.unsqueeze(1), weight, bias)
    assert found.dtype == expected.dtype
    assert found.equal(expected)
    with GroupLayers():
        assert torch.vmap(F.linear)(x, weight).shape == (CLIENTS, OUTPUTS)
