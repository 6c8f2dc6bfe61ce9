"""Privacy at sample level, by hand on `Points`: samples of client 0 are x=(1,0), y=2, of client 1 x=(0,1), y=4.

At w = 0 their gradients are (-2, 0) and (0, -4).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed.engine.wire.batches import batch_size_of
from lit_fed.methods import FedAvg
from lit_fed.privacy import SampleLevel
from lit_fed.privacy.sample_gradients import SampleGradients
from lit_fed.tasks import Classifier
from lit_fed.trainer import FederatedTrainer
from tests.privacy.support import uniform
from tests.support import LeastSquares, Points, assert_same, fit, weights

pytest.importorskip("dp_accounting")
W = "network.weight"


def points(*sizes: int, batch_size: int = 8, **kwargs: Any) -> Points:
    made = Points(sizes=(sizes[0], sizes[-1]), **kwargs)
    made.batch_size = batch_size
    return made


def run(folder: Path, clip_norm: float = 0.5, noise: float | None = 0.0, **kwargs: Any) -> FederatedTrainer:
    """A run of which everybody takes part in each round."""
    own = {name: kwargs.pop(name) for name in ("epsilon", "physical_batch", "key_file", "delta") if name in kwargs}
    privacy = SampleLevel(clip_norm, noise, **({"delta": 0.01} | own))
    return fit(folder, **({"data": points(2), "algorithm": uniform(), "max_rounds": 1, "privacy": privacy} | kwargs))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All batches from which gradients are taken."""
    found: list[Any] = []
    take = SampleGradients.take
    monkeypatch.setattr(SampleGradients, "take", lambda self, batch: (found.append(batch), take(self, batch))[1])
    return found


def test_the_gradient_of_each_sample_is_clipped_before_the_sum(tmp_path: Path) -> None:
    made = run(tmp_path)
    # Two times (-½, 0), over 2 expected: a step of ½ from 0 to (¼, 0), of the other client to (0, ¼); their mean.
    assert weights(made)[W].tolist() == [[0.125, 0.125]]


def test_the_sum_is_divided_by_the_expected_batch_and_not_by_its_size(tmp_path: Path, batches: list[Any]) -> None:
    sizes, moved = set(), set()
    for seed in range(4):
        batches.clear()
        made = run(tmp_path, data=points(4, batch_size=2), local_steps=1, seed=seed)
        found = [batch_size_of(batch) for batch in batches]
        # c clipped gradients of ½, over 2, by a rate of ½: c / 8 for each client, halved by the mean over both.
        assert weights(made)[W].tolist() == [[found[0] / 16, found[1] / 16]]
        sizes, moved = sizes | set(found), moved | {tuple(found)}
    assert len(sizes) > 2, "the batches have different sizes"


def test_an_empty_batch_is_a_step_of_noise(tmp_path: Path, batches: list[Any]) -> None:
    made = run(tmp_path, noise=1.0, data=points(64, batch_size=1), local_steps=8)
    assert len(batches) == 16
    assert 0 in map(batch_size_of, batches)  # each with probability (63/64)^64 = .37
    assert (weights(made)[W] != 0).all()
    assert all(made.run.federation.server["around.privacy"]["_rounds"] == 1)


def test_every_sample_is_drawn_by_itself_with_the_stated_probability(tmp_path: Path, batches: list[Any]) -> None:
    run(tmp_path, data=points(50, batch_size=10), local_steps=100)
    sizes = torch.tensor([batch_size_of(batch) for batch in batches], dtype=torch.float64)
    # 200 binomials of 50 at .2: mean 10, variance 8, whose estimates have errors √(8/200) = .2 and about 8·√(2/200) = .8.
    assert abs(float(sizes.mean()) - 10) < 0.8
    assert abs(float(sizes.var()) - 8) < 3.2


def test_the_noise_of_a_step_has_its_stated_deviation_and_is_the_clients_own(tmp_path: Path) -> None:
    class Wide(LeastSquares):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(40_000))  # unused: nothing but noise reaches it

    made = run(tmp_path, noise=3.0, module=Wide())
    noise = weights(made)["bias"].double()
    std = 0.5 * 3.0 * 0.5 / 2 / math.sqrt(2)  # rate · z C / B, and the mean of two clients' own
    assert abs(float(noise.var()) / std**2 - 1) < 4 * math.sqrt(2 / len(noise))
    assert abs(float(noise.mean())) < 4 * std / math.sqrt(len(noise))


def test_no_two_steps_have_the_same_noise(tmp_path: Path) -> None:
    class Wide(LeastSquares):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(10_000))

    one = weights(run(tmp_path / "1", noise=1.0, module=Wide(), local_steps=1))["bias"].double()
    two = weights(run(tmp_path / "2", noise=1.0, module=Wide(), local_steps=2))["bias"].double() - one
    # Independent: the variance of the second step is the first's, and their correlation's error is 1/√10,000.
    assert abs(float((one @ two) / (one.norm() * two.norm()))) < 0.04
    assert abs(float(two.var() / one.var()) - 1) < 0.08


class Blobs(Points):
    """Three clients of 20 random samples and three classes."""

    num_classes = 3
    input_shape = (4,)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(3, **kwargs)
        self.batch_size = 6

    def load_arrays(self) -> Any:
        from lit_fed.data import Arrays

        drawn = torch.Generator().manual_seed(0)
        x = torch.randn(60, 4, generator=drawn).numpy()
        y = torch.randint(3, (60,), generator=drawn).numpy()
        clients = torch.arange(3).repeat_interleave(20).numpy()
        return Arrays(x, y, x, y, clients, clients, "blobs")


def mlp() -> Classifier:
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)]
    return Classifier(torch.nn.Sequential(*layers), num_classes=3)


def test_without_clipping_and_noise_it_is_plain_descent_on_the_same_batches(tmp_path: Path, batches: list[Any]) -> None:
    """Not to the bit: a matrix product over a batch sums in another order than the exact sum of single gradients."""
    found = weights(run(tmp_path, 100.0, data=Blobs(), module=mlp(), local_epochs=2))
    assert len(batches) == 3 * 2 * 4, "⌈20 / 6⌉ batches a pass"
    ends = []
    for client in range(3):
        model = mlp()
        for x, y in batches[client * 8 : client * 8 + 8]:
            model.zero_grad()
            (torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / 6).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        ends.append(dict(model.state_dict()))
    for name, tensor in found.items():
        expected = torch.stack([end[name] for end in ends]).mean(0)
        assert torch.allclose(tensor, expected, rtol=0, atol=1e-6), name


def test_the_chunks_in_memory_change_rounding_only(tmp_path: Path) -> None:
    found = [
        weights(run(tmp_path / str(most), 0.3, data=Blobs(), module=mlp(), max_rounds=2, physical_batch=most))
        for most in (1, 4, 64)
    ]
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], rtol=0, atol=1e-6)
        assert torch.allclose(tensor, found[2][name], rtol=0, atol=1e-6)


def test_a_resumed_run_is_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", noise=1.0, data=Blobs(), module=mlp(), max_rounds=3)
    run(tmp_path / "parts", noise=1.0, data=Blobs(), module=mlp(), max_rounds=1)
    parts = run(tmp_path / "parts", noise=1.0, data=Blobs(), module=mlp(), max_rounds=3, ckpt_path="last")
    assert_same(weights(whole), weights(parts))
    assert whole.metrics["privacy/epsilon"] == parts.metrics["privacy/epsilon"]


def test_a_sample_without_a_finite_gradient_counts_as_none(tmp_path: Path) -> None:
    class Odd(LeastSquares):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            x, y = batch
            return super().loss(batch) / torch.where(y == 2, 0.0, 1.0).mean()  # infinite for client 0

    made = run(tmp_path, module=Odd())
    assert weights(made)[W].tolist() == [[0.0, 0.125]]


def test_nothing_of_the_training_is_logged(tmp_path: Path) -> None:
    made = run(tmp_path)
    assert [name for name in made.metrics if name.startswith("train/")] == ["train/lr"]
