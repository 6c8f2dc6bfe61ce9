"""Families of methods that share nothing with FedAvg fit the same loop: predictions, two architectures, split models.

These are small but whole methods; what they prove is that no hook is missing and that nothing is lost on a resume.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fed import Algorithm, Classifier, Client, Cohort, Model, Pass, Payload, Phase, Split, Update
from lit_fed.data import Digits, Shards
from lit_fed.engine.method.population import Population
from lit_fed.engine.method.reducers import Reducer, WeightedMean
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from lit_fed.networks import MLP, SmallCNN
from lit_fed.participation import UniformParticipation
from tests.support import assert_same, fit, rows, weights


class Exchange(Algorithm[Payload]):
    """Clients of two architectures exchange predictions on a public set and never weights; the server owns no model."""

    needs = frozenset({"loss", "forward", "public"})

    def setup(self, models: Mapping[str, Model], population: Population) -> dict[str, Any]:
        return {"targets": {}}

    def split(self, model: Model, round_idx: int) -> Split:
        return Split(shared=(), personal=tuple(model.parameters))

    def phases(self, client: Client) -> list[Phase | Pass]:
        if client.stage != "train":
            return []
        data = client.population
        private = Phase("private", client.train_loader(), epochs=2)
        predict = Pass("predictions", data.public_loader(), lambda one, batch: {"p": one.forward(batch[0]).softmax(1)})
        if not client.received:
            return [private, predict]
        refine = Phase("refine", data.public_loader(client.generator("public")), epochs=1, public=True)
        return [refine, private, predict]

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        if client.phase == "private":
            return super().objective(client, batch)
        x, index = batch
        return {"targets": F.cross_entropy(client.forward(x), client.received["targets"][index])}

    def finish(self, client: Client) -> Update:
        return Update({"targets": client.results["predictions"]["p"]})

    def broadcast(self, server: dict[str, Any], round_idx: int, kind: str, stage: Any = "train") -> Payload:
        return dict(server["targets"])

    def reducer(self, server: dict[str, Any]) -> Reducer[Payload]:
        return WeightedMean(uniform=True)

    def step(self, server: dict[str, Any], aggregate: Payload, cohort: Cohort) -> dict[str, float]:
        server["targets"] = dict(aggregate)
        return {"server/confidence": float(aggregate["targets"].amax(1).mean())}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=3e-3)


def exchange(folder: Path, rounds: int, ckpt_path: str | None = None) -> Any:
    torch.manual_seed(0)
    models = {
        "mlp": Classifier(MLP(10, 1, (1, 8, 8), hidden=(16,)), adam),
        "cnn": Classifier(SmallCNN(width=4), adam),
    }
    data = Digits(num_clients=6, partition=Shards(5), batch_size=20, max_train_samples=700)
    algorithm, participation = Exchange(public_size=100), UniformParticipation(count=4)
    return fit(folder, models, data, algorithm, max_rounds=rounds, participation=participation, ckpt_path=ckpt_path)


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
    assert_same(*(made.run.federation.server["targets"] for made in (whole, parts)))
    for client_id in range(6):
        states = [made.run.federation.store.get(client_id) for made in (whole, parts)]
        assert (states[0] is None) == (states[1] is None)
        if states[0] is not None:
            assert_same(states[0], states[1])


class Freezing(FedAvg):
    """Freezes the first layer from round 1 on, and keeps the head at home."""

    def split(self, model: Model, round_idx: int) -> Split:
        frozen = tuple(n for n in model.parameters if n.startswith("network.body.0")) if round_idx >= 1 else ()
        personal = tuple(name for name in model.parameters if name.startswith("network.head"))
        return Split(tuple(name for name in model.parameters if name not in (*frozen, *personal)), personal, frozen)


def freeze(folder: Path, rounds: int, ckpt_path: str | None = None) -> Any:
    torch.manual_seed(0)
    module = Classifier(SmallCNN(width=4), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1))
    data = Digits(num_clients=4, max_train_samples=400)
    return fit(folder, module, data, Freezing(), max_rounds=rounds, ckpt_path=ckpt_path)


def test_a_split_that_changes_with_the_round(tmp_path: Path) -> None:
    names = dict(SmallCNN(width=4).named_parameters())
    first = [name for name in names if name.startswith("body.0")]
    assert first, "SmallCNN has no body.0: this test freezes nothing"
    one, three = freeze(tmp_path / "one", 1), freeze(tmp_path / "three", 3)
    for name in first:  # frozen where round 0's mean left it, whatever AdamW's decay and momentum do
        assert torch.equal(weights(one)[f"network.{name}"], weights(three)[f"network.{name}"])
    travels = {
        round_idx: 4 * sum(p.numel() for n, p in names.items() if not n.startswith(("head", "body.0")[: 1 + round_idx]))
        for round_idx in (0, 1)
    }
    sent = [float(row["comm/uplink_bytes"]) for row in rows(three.log_dir / "metrics.csv")]
    assert sent == [4 * travels[0], 4 * travels[1], 4 * travels[1]]
    parts = (freeze(tmp_path / "parts", 1), freeze(tmp_path / "parts", 3, "last"))[1]
    assert_same(weights(three), weights(parts))


def test_a_split_must_name_every_parameter_once(tmp_path: Path) -> None:
    class Forgetful(FedAvg):
        def split(self, model: Model, round_idx: int) -> Split:
            return Split(shared=("network.head.weight",), personal=("network.head.weight",))

    with pytest.raises(ConfigError, match="must name each parameter exactly once"):
        fit(tmp_path, Classifier(SmallCNN(width=4)), Digits(num_clients=4), Forgetful())
