"""Families of methods that share nothing with FedAvg fit the same loop: predictions, two architectures, split models.

These are small but whole methods; what they prove is that no hook is missing and that nothing is lost on a resume.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning import Fabric
from torch import Tensor, nn

from lit_fed import Algorithm, Classifier, ClientContext, ClientModule, ClientUpdate, Payload, Phase, Split
from lit_fed.data import Digits, FederatedDataModule, Shards
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from lit_fed.networks import MLP, SmallCNN
from lit_fed.participation import UniformParticipation
from lit_fed.reducers import Reducer, WeightedMean
from tests.support import assert_same, fit, rows, weights


class Exchange(ClientModule):
    """Clients of two architectures that exchange predictions on a public set and never weights."""

    def __init__(self) -> None:
        super().__init__()
        self.networks = nn.ModuleDict({"cnn": SmallCNN(width=4), "mlp": MLP(10, 1, (1, 8, 8), hidden=(16,))})

    @property
    def architecture(self) -> str:
        assert self.ctx is not None
        return "cnn" if self.ctx.client_id % 2 else "mlp"

    def split(self, round_idx: int) -> Split:
        return Split(shared=(), personal=tuple(name for name, _ in self.named_parameters()))

    def receive(self, payload: Payload) -> None:
        pass  # the targets are read from self.received

    def client_state_dict(self) -> dict[str, Tensor]:
        prefix = f"networks.{self.architecture}."
        return {name: tensor for name, tensor in super().client_state_dict().items() if name.startswith(prefix)}

    def phases(self, ctx: ClientContext) -> list[Phase]:
        private = Phase("private", ctx.train_loader(), epochs=2)
        if not self.received:
            return [private]
        return [Phase("refine", ctx.data.public_loader(ctx.generator("public")), epochs=1), private]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.networks[self.architecture].parameters(), lr=3e-3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.networks[self.architecture](x)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        assert self.ctx is not None
        x, y = batch
        loss = F.cross_entropy(self(x), self.received["targets"][y] if self.ctx.phase == "refine" else y)
        self.log(f"train/{self.ctx.phase}", loss)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test/acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    @torch.no_grad()
    def make_update(self, ctx: ClientContext) -> ClientUpdate:
        self.eval()
        predictions = torch.cat([self(x).softmax(1) for x, _ in ctx.data.public_loader()])
        self.train()
        return ClientUpdate(ctx.client_id, {"predictions": predictions})


class Mixing(Algorithm[Payload]):
    """A server that owns no model, only the mean of the last predictions."""

    def setup(self, module: ClientModule, data: FederatedDataModule, fabric: Fabric) -> None:
        self.targets: Tensor | None = None

    def broadcast(self, round_idx: int) -> Payload:
        return {} if self.targets is None else {"targets": self.targets}

    def reducer(self) -> Reducer[Payload]:
        return WeightedMean(uniform=True)

    def step(self, aggregate: Payload, round_idx: int, num_clients: int) -> dict[str, float]:
        self.targets = aggregate["predictions"]
        return {"server/confidence": float(self.targets.amax(1).mean())}

    def global_state(self) -> dict[str, Tensor]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"targets": self.targets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.targets = state["targets"]


def exchange(folder: Path, rounds: int, ckpt_path: str | None = None) -> Any:
    torch.manual_seed(0)
    data = Digits(num_clients=6, partition=Shards(5), public_size=100, batch_size=20, max_train_samples=700)
    participation = UniformParticipation(count=4)
    return fit(folder, Exchange(), data, Mixing(), max_rounds=rounds, participation=participation, ckpt_path=ckpt_path)


def test_prediction_exchange_between_two_architectures(tmp_path: Path) -> None:
    made = exchange(tmp_path, 3)
    metrics = rows(made.log_dir / "metrics.csv")
    # 100 public samples × 10 classes × 4 bytes from each of 4 clients; nothing comes down before the first round.
    assert [float(row["comm/uplink_bytes"]) for row in metrics] == [16000] * 3
    assert [float(row["comm/downlink_bytes"]) for row in metrics] == [0, 16000, 16000]
    assert "global/acc" not in metrics[-1]
    accuracies = [float(row["clients/acc_mean"]) for row in metrics]
    assert accuracies[-1] > max(0.4, accuracies[0]), accuracies
    content = torch.load(made.log_dir / "checkpoints/last.ckpt", weights_only=True)
    assert content["state_dict"] == {}
    assert (made.log_dir / "checkpoints/best.ckpt").is_file()  # by clients/acc_mean


def test_prediction_exchange_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = exchange(tmp_path / "whole", 4)
    exchange(tmp_path / "parts", 2)
    parts = exchange(tmp_path / "parts", 4, "last")
    assert torch.equal(whole.federation.algorithm.targets, parts.federation.algorithm.targets)
    for client_id in range(6):
        states = [made.federation.store.get(client_id) for made in (whole, parts)]
        assert (states[0] is None) == (states[1] is None)
        if states[0] is not None:
            assert_same(states[0], states[1])


class Thawing(Classifier):
    """Freezes its first layer from round 1 on, and keeps its head at home."""

    def split(self, round_idx: int) -> Split:
        names = [name for name, _ in self.named_parameters()]
        frozen = tuple(name for name in names if name.startswith("network.body.0")) if round_idx >= 1 else ()
        personal = tuple(name for name in names if name.startswith("network.head"))
        shared = tuple(name for name in names if name not in (*frozen, *personal))
        return Split(shared, personal, frozen)


def thaw(folder: Path, rounds: int, ckpt_path: str | None = None) -> Any:
    torch.manual_seed(0)
    module = Thawing(network=SmallCNN(width=4), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1))
    data = Digits(num_clients=4, max_train_samples=400)
    return fit(folder, module, data, FedAvg(), max_rounds=rounds, ckpt_path=ckpt_path)


def test_a_split_that_changes_with_the_round(tmp_path: Path) -> None:
    names = dict(SmallCNN(width=4).named_parameters())
    first = [name for name in names if name.startswith("body.0")]
    assert first, "SmallCNN has no body.0: this test freezes nothing"
    one, three = thaw(tmp_path / "one", 1), thaw(tmp_path / "three", 3)
    for name in first:  # frozen where round 0's mean left it, whatever AdamW's decay and momentum do
        assert torch.equal(weights(one)[f"network.{name}"], weights(three)[f"network.{name}"])
    travels = {
        round_idx: 4 * sum(p.numel() for n, p in names.items() if not n.startswith(("head", "body.0")[: 1 + round_idx]))
        for round_idx in (0, 1)
    }
    sent = [float(row["comm/uplink_bytes"]) for row in rows(three.log_dir / "metrics.csv")]
    assert sent == [4 * travels[0], 4 * travels[1], 4 * travels[1]]
    parts = (thaw(tmp_path / "parts", 1), thaw(tmp_path / "parts", 3, "last"))[1]
    assert_same(weights(three), weights(parts))


def test_a_split_must_name_every_parameter_once(tmp_path: Path) -> None:
    class Forgetful(Classifier):
        def split(self, round_idx: int) -> Split:
            return Split(shared=("network.head.weight",), personal=("network.head.weight",))

    with pytest.raises(ConfigError, match="must name each parameter once"):
        fit(tmp_path, Forgetful(network=SmallCNN(width=4)), Digits(num_clients=4))
