"""Which losses are proven to be means over samples: each is what the whole batch gives, and no other is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fed.engine.vectorized.by_sample import BySample, Ignored, Unproven

Loss = Callable[[Tensor, Tensor], Any]


def made(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*layers)


FLAT, ROWS = made(nn.Flatten(), nn.Linear(64, 3)), made(nn.Linear(8, 3))
CONV = made(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))
POOL = made(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
NORM = made(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
BATCH_NORM = made(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3))
TESTED = made(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3)).eval()
WORDS = nn.Embedding(4, 3, padding_idx=0)
ce = F.cross_entropy


def each(x: Tensor, y: Tensor) -> Tensor:
    return ce(FLAT(x), y, reduction="none")


def first(x: Tensor) -> Tensor:
    return FLAT(x)[:, 0]


def with_token(x: Tensor) -> Tensor:
    return ROWS(torch.cat([torch.ones(1, 1, 8).expand(x.shape[0], -1, -1), x.squeeze(1)], 1).mean(1))


MEANS: dict[str, Loss] = {
    "cross entropy": lambda x, y: ce(FLAT(x), y),
    "smoothed": lambda x, y: ce(FLAT(x), y, label_smoothing=0.1),
    "probabilities": lambda x, y: ce(FLAT(x), CONV(x).softmax(1)),
    "nll": lambda x, y: F.nll_loss(CONV(x).log_softmax(1), y),
    "layer norm": lambda x, y: nn.CrossEntropyLoss()(NORM(x), y),
    "group norm": lambda x, y: ce(POOL(x), y),
    "tested batch norm": lambda x, y: ce(TESTED(x), y),
    "words": lambda x, y: ce(WORDS((x.flatten(1) > 0).long()).mean(1), y),
    "squared": lambda x, y: F.mse_loss(first(x), y.float()),
    "absolute": lambda x, y: F.l1_loss(first(x), y.float()) + F.huber_loss(first(x), y.float()),
    "smooth": lambda x, y: F.smooth_l1_loss(FLAT(x), CONV(x)),
    "binary": lambda x, y: F.binary_cross_entropy_with_logits(first(x), (y > 0).float()),
    "binary by probability": lambda x, y: F.binary_cross_entropy(first(x).sigmoid(), (y > 0).float()),
    "mean of each": lambda x, y: each(x, y).mean(),
    "focal": lambda x, y: ((1 - (-each(x, y)).exp()) ** 2 * each(x, y)).mean(),
    "sum by size": lambda x, y: ce(FLAT(x), y, reduction="sum") / x.shape[0],
    "sum by values": lambda x, y: FLAT(x).square().sum() / FLAT(x).numel(),
    "divergence": lambda x, y: F.kl_div(FLAT(x).log_softmax(1), CONV(x).softmax(1), reduction="batchmean"),
    "cosine": lambda x, y: (1 - F.cosine_similarity(FLAT(x), CONV(x))).mean(),
    "weights' norm": lambda x, y: ce(FLAT(x), y) + 0.1 * sum(p.square().sum() for p in FLAT.parameters()),
    "stacked terms": lambda x, y: torch.stack([ce(FLAT(x), y), 2 * ce(CONV(x), y)]).sum(),
    "size in a view": lambda x, y: ce(FLAT[1](x.view(x.size(0), -1)), y),
    "inferred size": lambda x, y: ce(FLAT[1](x.view(-1, 64)), y),
    "joined dimensions": lambda x, y: ce(ROWS(x.squeeze(1)).reshape(-1, 3), y[:, None].expand(-1, 8).reshape(-1)),
    "token": lambda x, y: ce(with_token(x), y),
    "attention": lambda x, y: ce(ROWS(F.scaled_dot_product_attention(x, x, x).mean((1, 2))), y),
    "gather": lambda x, y: -FLAT(x).log_softmax(1).gather(1, y[:, None]).mean(),
    "table": lambda x, y: (FLAT(x).log_softmax(1) * torch.eye(3)[y]).sum(1).mean(),
    "where": lambda x, y: torch.where(y > 0, first(x), 0.0).mean(),
    "standardised": lambda x, y: ce(FLAT((x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)), y),
}


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient / gradient.sum()


def changed(x: Tensor, y: Tensor) -> Tensor:
    losses = each(x, y)
    losses[0] = 0
    return losses.mean()


def halves(x: Tensor) -> Tensor:
    one, other = ROWS(x.squeeze(1)).reshape(-1, 3).chunk(2)
    return (one - other).square().mean()


OTHERS: dict[str, Loss] = {
    "sum": lambda x, y: each(x, y).sum(),
    "largest": lambda x, y: ce(FLAT(x), y) + F.relu(each(x, y).max() - 3),
    "clamped at the mean": lambda x, y: torch.minimum(each(x, y), 4 * each(x, y).mean().detach()).mean(),
    "masked": lambda x, y: (each(x, y) * (y > 0)).sum() / (y > 0).sum().clamp_min(1),
    "root": lambda x, y: F.mse_loss(first(x), y.float()).sqrt(),
    "power": lambda x, y: each(x, y).mean() ** 2,
    "product": lambda x, y: each(x, y).mean() * each(x, y).mean(),
    "by its own size": lambda x, y: each(x, y).mean() / each(x, y).mean().detach(),
    "clamped mean": lambda x, y: each(x, y).mean().clamp(max=1),
    "class weights": lambda x, y: ce(FLAT(x), y, weight=torch.tensor([1.0, 2.0, 3.0])),
    "len": lambda x, y: ce(FLAT(x), y) * len(x),
    "shape": lambda x, y: ce(FLAT(x), y) * x.shape[0],
    "numel": lambda x, y: ce(FLAT(x), y) * x.numel(),
    "branch": lambda x, y: ce(FLAT(x), y) if x.shape[0] > 3 else FLAT[1].weight.sum(),
    "equal size": lambda x, y: ce(FLAT(x), y) if x.size(0) == 1 else FLAT[1].weight.sum(),
    "loop": lambda x, y: sum(ce(FLAT(x), y) for _ in range(x.shape[0])),
    "ones": lambda x, y: ce(FLAT(x), y) * torch.ones(x.shape[0]).sum(),
    "ones like": lambda x, y: ce(FLAT(x), y) * torch.ones_like(y).sum(),
    "full": lambda x, y: ce(FLAT(x), y) * torch.full((), x.shape[0]),
    "tensor of size": lambda x, y: ce(FLAT(x), y) * torch.tensor(x.shape[0]),
    "positions": lambda x, y: (each(x, y) * torch.arange(x.shape[0])).mean(),
    "mixed up": lambda x, y: (FLAT(x) - FLAT(x).flip(0)).square().mean(),
    "rolled": lambda x, y: (FLAT(x) - FLAT(x).roll(1, 0)).square().mean(),
    "contrast": lambda x, y: ce(FLAT(x) @ FLAT(x).T, y),
    "covariance": lambda x, y: (FLAT(x).T @ FLAT(x)).square().mean(),
    "softmax over samples": lambda x, y: FLAT(x).softmax(0).square().mean(),
    "norm over samples": lambda x, y: F.normalize(FLAT(x), dim=0).square().mean(),
    "one sample": lambda x, y: FLAT(x)[0].square().mean(),
    "all but one": lambda x, y: FLAT(x)[1:].square().mean(),
    "batch norm": lambda x, y: ce(BATCH_NORM(x), y),
    "centred": lambda x, y: (FLAT(x) - FLAT(x).mean(0)).square().mean(),
    "variance": lambda x, y: FLAT(x).var(0).sum(),
    "median": lambda x, y: each(x, y).median(),
    "running sum": lambda x, y: each(x, y).cumsum(0).mean(),
    "hardest": lambda x, y: each(x, y).topk(2).values.mean(),
    "every pair": lambda x, y: F.mse_loss(FLAT(x)[:, :1], y.float()),
    "squeezed": lambda x, y: F.mse_loss(FLAT(x)[:, :1].squeeze(), y.float()),
    "log of a sum": lambda x, y: each(x, y).logsumexp(0),
    "own gradient": lambda x, y: ce(Doubled.apply(FLAT(x)), y),
    "convolved losses": lambda x, y: F.conv1d(each(x, y)[None, None], torch.ones(1, 1, 3), padding=1).mean(),
    "one long row": lambda x, y: x.view(1, -1)[:, :64].square().mean(),
    "halves": lambda x, y: halves(x),
    "columns first": lambda x, y: ROWS(x.squeeze(1)).transpose(0, 1).reshape(-1, 12).softmax(1).square().mean(),
    "changed in place": changed,
    "targets in place": lambda x, y: ce(FLAT(x), y.masked_fill_(y > 1, -100)),
    "computed targets": lambda x, y: ce(FLAT(x), torch.where(y > 1, -100, y)),
    "without NaN": lambda x, y: each(x, y).nanmean(),
}


def by_sample(
    loss: Loss, x: Tensor, y: Tensor, holds: Callable[[int, int], bool] = lambda place, value: False
) -> Tensor:
    """Losses of every sample of some clients, (clients, samples)."""
    proof = BySample(2, holds)

    def one(sample: Any) -> Tensor:
        found: Tensor = loss(*proof.begin(sample))
        proof.expect([found])
        return found

    with proof:
        losses: Tensor = torch.vmap(torch.vmap(one))((x, y))
    return losses


@pytest.fixture
def batches() -> tuple[Tensor, Tensor]:
    """Of three clients, with four samples each."""
    draws = torch.Generator().manual_seed(1)
    return torch.randn(3, 4, 1, 8, 8, generator=draws), torch.randint(0, 3, (3, 4), generator=draws)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MEANS)
def test_the_mean_of_samples_is_the_loss_of_the_batch(name: str, batches: tuple[Tensor, Tensor]) -> None:
    found = by_sample(MEANS[name], *batches).mean(1)
    expected = torch.stack([MEANS[name](x, y) for x, y in zip(*batches, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_a_loss_that_is_not_a_mean_over_samples_is_not_taken_by_sample(
    name: str, batches: tuple[Tensor, Tensor]
) -> None:
    with pytest.raises(Unproven):
        by_sample(OTHERS[name], *batches)


@pytest.mark.parametrize("ignored", [-100, 0])
def test_a_loss_that_ignores_a_target_is_a_mean_where_the_batch_does_not_hold_it(
    ignored: int, batches: tuple[Tensor, Tensor]
) -> None:
    asked: list[tuple[int, int]] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return ce(FLAT(x), y.view(-1), ignore_index=ignored)

    by_sample(loss, *batches, holds=lambda place, value: bool(asked.append((place, value))))
    assert asked == [(1, ignored)]  # the second leaf of the batch
    with pytest.raises(Ignored, match=f"a loss ignores {ignored}"):
        by_sample(loss, *batches, holds=lambda place, value: True)
