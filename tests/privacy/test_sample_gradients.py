"""Gradients of single samples: as autograd takes them one by one, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lit_fed.data import Arrays
from lit_fed.errors import ConfigError
from lit_fed.privacy import SampleLevel
from lit_fed.privacy.sample_gradients import SampleGradients
from lit_fed.tasks import Classifier
from tests.privacy.support import uniform
from tests.support import Points, fit

pytest.importorskip("dp_accounting")


class Pixels(Points):
    """Two clients with seven samples each of 8 × 8 values of one channel, or of 12 words of 20, in three classes."""

    num_classes = 3

    def __init__(self, words: bool = False) -> None:
        super().__init__(2)
        self.words, self.input_shape = words, (12,) if words else (1, 8, 8)
        self.batch_size = 5

    def load_arrays(self) -> Arrays:
        drawn = np.random.default_rng(0)
        x = drawn.integers(20, size=(14, 12)) if self.words else drawn.normal(size=(14, 1, 8, 8)).astype(np.float32)
        y, clients = drawn.integers(3, size=14), np.arange(2).repeat(7)
        return Arrays(x, y, x, y, clients, clients, "pixels")


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = (
            nn.Embedding(20, 6, padding_idx=0),
            kind(6, 5, batch_first=True),
            nn.Linear(5, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(x))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(20, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Tied(nn.Module):
    """One matrix embeds words and reads them out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(20, 6), nn.Linear(6, 20, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.embedding(x).mean(1)))[:, :3]


class LowRank(nn.Module):
    """A frozen layer with an adapter, and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(64, 16), nn.Linear(64, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.head = nn.Linear(16, 3)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(F.gelu(self.base(x) + self.up(self.down(x))))


def convolutional(*normal: nn.Module) -> nn.Module:
    first = [nn.Conv2d(1, 4, 3, padding=1), *normal, nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Conv2d(4, 8, 3, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(20, 8), layer, nn.Flatten(), nn.Linear(96, 3))


PICTURES: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.PReLU(), nn.Linear(9, 3)),
    "convolution": convolutional,
    "group_norm": lambda: convolutional(nn.GroupNorm(2, 4)),
    "instance_norm": lambda: convolutional(nn.InstanceNorm2d(4, affine=True)),
    "layer_norm": lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 3)),
    "adapter": LowRank,
}
WORDS: Mapping[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Sequential(nn.Embedding(20, 5, padding_idx=0), nn.Flatten(), nn.Linear(60, 3)),
    "tied": Tied,
    "attention": Attention,
    "encoder": encoder,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
}


def run(
    folder: Path, network: nn.Module, words: bool = False, task: type[Classifier] = Classifier, **kwargs: Any
) -> None:
    given = {"max_rounds": 1, "buffers": "local", "privacy": SampleLevel(0.1, 1.0, delta=0.01), **kwargs}
    fit(folder, task(network, num_classes=3), Pixels(words), uniform(), **given)


@pytest.mark.parametrize("name", [*PICTURES, *WORDS])
def test_gradients_are_those_of_autograd_one_by_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take, seen = SampleGradients.take, 0

    def compared(self: SampleGradients, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal seen
        _, found = self._alone(self._objective, batch)
        own = {name: p for name, p in self._loop.model.parameters.items() if p.requires_grad}
        for idx in range(len(batch[0])):
            loss = self._loop.training_step((batch[0][idx : idx + 1], batch[1][idx : idx + 1]), 0)
            for key, gradient in zip(own, torch.autograd.grad(loss, list(own.values())), strict=True):
                # Single precision: 24 bits of gradients of about 1, in sums of up to 64 products.
                assert torch.allclose(found[key][idx], gradient, rtol=1e-5, atol=1e-6), key
            seen += 1
        return take(self, batch)

    monkeypatch.setattr(SampleGradients, "take", compared)
    torch.manual_seed(0)
    run(tmp_path, {**PICTURES, **WORDS}[name](), name in WORDS)
    assert seen > 10
    assert ("takes the samples of a batch in turn" in capsys.readouterr().out) == (name in ("lstm", "gru"))


def test_what_no_computation_of_many_samples_can_do_is_done_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, PICTURES["linear"](), task=Numbers)
    assert "takes the samples of a batch in turn, which is slow: RuntimeError: " in capsys.readouterr().out


def test_dropout_draws_for_each_sample_and_step_by_the_clients_own_numbers(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    run(tmp_path, network)


class Contrast(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = F.normalize(self(batch[0]), dim=1)
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))


class Summed(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum")


class Weighted(Classifier):
    """Its mean divides by the weights of the batch's classes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], torch.tensor([1.0, 2.0, 5.0]))


class ByHand(Classifier):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False


class Measured(Classifier):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.update(self(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)


class Logged(Measured):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen(self(batch[0]), batch[1])
        self.log("train/acc", self.seen)
        return F.cross_entropy(self(batch[0]), batch[1])


class Counted(Classifier):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("centre", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.centre = 0.9 * self.centre + 0.1 * logits.mean(0).detach()
        return F.cross_entropy(logits, batch[1])


class Written(Counted):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.centre += 1
        return Classifier.training_step(self, batch, batch_idx)


class Numbers(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss if loss.item() < 100 else 2 * loss


class Mixing(Classifier):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0] + batch[0].flip(0)) / 2, batch[1]


class Watching(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = batch


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


MIXES = "it mixes the samples of a batch"


@pytest.mark.parametrize(
    ("network", "task", "says"),
    [
        (lambda: convolutional(nn.BatchNorm2d(4)), Classifier, "batch norm in 'network.1' mixes the samples"),
        (lambda: convolutional(Centred()), Classifier, MIXES),
        (PICTURES["linear"], Contrast, MIXES),
        (PICTURES["linear"], Summed, MIXES),
        (PICTURES["linear"], Weighted, MIXES),
        (PICTURES["linear"], ByHand, "it optimises by hand"),
        (PICTURES["linear"], Measured, "SampleLevel cannot bound what a sample does to model Measured: "),
        (PICTURES["linear"], Logged, "SampleLevel cannot bound what a sample does to model Logged: "),
        (PICTURES["linear"], Counted, "it writes the buffer 'centre'"),
        (PICTURES["linear"], Written, "it writes the buffer 'centre'"),
        (PICTURES["linear"], Mixing, "has on_after_batch_transfer, which sees samples past the bound"),
        (PICTURES["linear"], Watching, "has on_train_batch_end, which sees samples past the bound"),
    ],
    ids=["batch_norm", "centred", "contrast", "sum", "weights", "by_hand", "metric", "logged", "rebound", "in_place",
         "mixup", "watching"],
)  # fmt: skip
def test_a_module_that_mixes_samples_is_refused_by_name(
    network: Callable[[], nn.Module], task: type[Classifier], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        run(tmp_path, network(), task=task)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "lightning_logs").exists(), "before anything of the run"


def test_a_torch_that_does_not_count_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_fed.privacy.sample_gradients.has_versions", False)
    says = "SampleLevel, which sees writes, and torch .* has no Tensor._version; install an earlier torch"
    with pytest.raises(ConfigError, match=says):
        run(tmp_path, PICTURES["linear"]())


def test_a_step_that_begins_to_mix_samples_later_is_refused_there(tmp_path: Path) -> None:
    class Later(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self(batch[0])
            if self.current_epoch == 1:
                logits = logits - logits.mean(0)
            return F.cross_entropy(logits, batch[1])

    with pytest.raises(Exception, match=MIXES):
        run(tmp_path, PICTURES["linear"](), task=Later, **{"max_rounds": 2})


@pytest.mark.parametrize("name", ["linear", "mlp", "layer_norm", "group_norm"])
def test_gradients_are_opacus_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opacus = pytest.importorskip("opacus")
    take, seen = SampleGradients.take, 0

    def compared(self: SampleGradients, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal seen
        _, found = self._alone(self._objective, batch)
        network = deepcopy(self._loop.model.task.network)
        for module in network.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = False  # which Opacus cannot have
        hooked = opacus.GradSampleModule(network)
        F.cross_entropy(hooked(batch[0]), batch[1]).backward()
        for key, p in network.named_parameters():
            assert torch.allclose(found[f"network.{key}"], p.grad_sample, rtol=0, atol=1e-6), key
            seen += 1
        return take(self, batch)

    monkeypatch.setattr(SampleGradients, "take", compared)
    torch.manual_seed(0)
    run(tmp_path, {**PICTURES, **WORDS}[name](), name in WORDS)
    assert seen
