"""UWA by hand, against SciPy's densities, and at the temperatures at which it is another method."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from scipy.special import logsumexp, softmax
from scipy.stats import multivariate_normal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lit_fed import Classifier, FederatedTrainer
from lit_fed.callbacks import Callback, Dashboard
from lit_fed.data import ClassesPerClient, Digits
from lit_fed.engine.loop.run import Run
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.errors import ConfigError
from lit_fed.methods import UWA, FederatedDistillation
from lit_fed.networks import Logistic
from lit_fed.protocols import ClientGlobalTest
from tests.methods.distillation.test_mixing import ALONE
from tests.support import ROOT, assert_same, events_of, fit, kept, rows

PUBLIC = 80


def data(k: int = 3, **kwargs: Any) -> Digits:
    settings: dict[str, Any] = {"num_clients": 4, "partition": ClassesPerClient(k, samples_per_client=60), "seed": 1}
    return Digits(**({"batch_size": 16} | settings | kwargs))


def module() -> Classifier:
    torch.manual_seed(0)
    return Classifier(Logistic(10, 1, (1, 8, 8)), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def uwa(temperature: float = 1.0, **kwargs: Any) -> UWA:
    return UWA(temperature, **({"public_size": PUBLIC} | kwargs))


class Eavesdropper(Callback):
    """Keeps what clients sent in the last round."""

    def __init__(self) -> None:
        self.sent: dict[int, dict[str, Tensor]] = {}

    def on_client_end(self, run: Run, update: ClientUpdate) -> None:
        self.sent[update.client_id] = {name: tensor.clone() for name, tensor in update.payload.items()}


def run(folder: Path, temperature: float, rounds: int = 2, **kwargs: Any) -> tuple[FederatedTrainer, Eavesdropper]:
    ear = Eavesdropper()
    made = fit(
        folder, module(), data(kwargs.pop("k", 3)), uwa(temperature), max_rounds=rounds, callbacks=[ear], **kwargs
    )
    return made, ear


def test_two_clients_by_hand() -> None:
    # One public sample, two classes, one Gaussian each.
    # A: z = (0, 0), μ = (0, 0), σ² = (1, 1):        ℓ = −log 2π                             = −1.837877
    # B: z = (ln 3, 0), μ = (ln 3 − 2, 0), σ² = (4, 1): ℓ = −½·2²/4 − ½·ln 4 − log 2π        = −3.031024
    # w_A = 1/(1 + e^−1.193147) = 1/1.303265 = 0.767304; p_A = (½, ½), p_B = (¾, ¼):
    # p = 0.767304·½ + 0.232696·¾ = 0.383652 + 0.174522 = 0.558174. χ = 0.588755 + 0.054147 = 0.642903.
    ln3 = math.log(3)
    sent = (
        {"logits": torch.zeros(1, 2), "mean": torch.zeros(1, 2), "variance": torch.ones(1, 2)},
        {
            "logits": torch.tensor([[ln3, 0.0]]),
            "mean": torch.tensor([[ln3 - 2, 0.0]]),
            "variance": torch.tensor([[4.0, 1.0]]),
        },
    )
    reducer = uwa().mixture()
    for client_id, payload in enumerate(sent):
        reducer.add(ClientUpdate(client_id, payload))
    mixed = reducer.result(ALONE)
    assert mixed is not None
    assert mixed.mean[0].tolist() == pytest.approx([0.558174, 1 - 0.558174], abs=1e-6)
    assert mixed.concentration.item() == pytest.approx(0.642903, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_weights_are_scipys(tmp_path: Path, temperature: float) -> None:
    made, ear = run(tmp_path, temperature)
    densities = []
    for client_id in range(4):
        logits, mean, variance = (ear.sent[client_id][key].double().numpy() for key in ("logits", "mean", "variance"))
        parts = [multivariate_normal(m, np.diag(v)).logpdf(logits) for m, v in zip(mean, variance, strict=True)]
        densities.append(logsumexp(parts, axis=0) - np.log(len(parts)))
    weights = softmax(temperature * np.stack(densities), axis=0)
    predictions = np.stack([softmax(ear.sent[c]["logits"].double().numpy(), axis=1) for c in range(4)])
    expected = np.einsum("mp,mpc->pc", weights, predictions)
    server = made.run.federation.server
    np.testing.assert_allclose(server["targets"], expected, rtol=1e-5, atol=1e-7)
    assert made.metrics["server/chi"] == pytest.approx((weights**2).sum(0).mean())
    entropy = -(weights * np.log(np.maximum(weights, 1e-300))).sum(0).mean()
    assert made.metrics["server/weight_entropy"] == pytest.approx(entropy, abs=1e-9)
    assert weights.max() > 0.9, "no client is trusted: this tells nothing"
    classes = expected.argmax(1)
    for label in range(10):
        of_class = weights[:, classes == label]
        mean_weights = of_class.mean(1) if of_class.size else np.full(4, -1.0)
        np.testing.assert_allclose(server["weights"][:, label], mean_weights, atol=1e-7)  # float32


def test_densities_are_those_of_the_calibration_samples(tmp_path: Path) -> None:
    made, ear = run(tmp_path, 1.0, rounds=1)
    federation = made.run.federation
    for client_id in range(4):
        client = federation.session.enter(client_id, federation.broadcast(0, "test"), "test")
        x, y = next(iter(federation.data.calibration_loader(client_id)))
        assert len(y) == 12  # a fifth of 60
        with torch.no_grad():
            logits = client.forward(x).double()
        classes = [label for label in y.unique() if (y == label).sum() >= 2]
        expected = torch.stack([logits[y == label].mean(0) for label in classes])
        torch.testing.assert_close(ear.sent[client_id]["mean"].double(), expected, rtol=1e-5, atol=1e-6)


def test_temperature_0_is_the_average(tmp_path: Path) -> None:
    blind, _ = run(tmp_path / "uwa", 0.0, rounds=3)
    plain = FederatedDistillation(public_size=PUBLIC, calibration_fraction=0.2)
    average = fit(tmp_path / "avg", module(), data(), plain, max_rounds=3)
    assert torch.equal(*(made.run.federation.server["targets"] for made in (blind, average)))
    for client_id in range(4):
        assert_same(kept(blind, client_id), kept(average, client_id))
    assert blind.metrics["server/chi"] == 0.25


def test_an_infinite_temperature_takes_the_most_confident(tmp_path: Path) -> None:
    infinite, ear = run(tmp_path, math.inf)
    method, server = infinite.run.federation.algorithm, infinite.run.federation.server
    scores = torch.stack([method.read(ear.sent[client_id])[1] for client_id in range(4)])
    predictions = torch.stack([ear.sent[client_id]["logits"].double().softmax(1) for client_id in range(4)])
    best = predictions[scores.argmax(0), torch.arange(PUBLIC)]
    assert torch.equal(server["targets"], best.float())
    assert infinite.metrics["server/chi"] == 1.0


def test_bytes_by_arithmetic(tmp_path: Path) -> None:
    made, ear = run(tmp_path, 1.0)
    up = [row for row in rows(made.log_dir / "clients.csv") if row["metric"] == "uplink_bytes" and row["round"] == "1"]
    for row in up:
        # 80 public samples × 10 classes × 4 bytes, and per class a mean and a variance of 10 logits, 4 bytes each.
        num_classes = len(ear.sent[int(row["client_id"])]["mean"])
        assert 1 <= num_classes <= 3
        assert float(row["value"]) == 80 * 10 * 4 + num_classes * 2 * 10 * 4
    assert len(up) == 4
    assert made.metrics["comm/downlink_bytes"] == 4 * 80 * 10 * 4


def test_clients_of_one_class_and_clients_without_a_density(tmp_path: Path) -> None:
    one_class, ear = run(tmp_path / "one", 1.0, k=1)
    assert [len(ear.sent[client_id]["mean"]) for client_id in range(4)] == [1] * 4
    known = one_class.run.federation.server["targets"]
    assert known.isfinite().all()
    # A fifth of 4 samples is one: no class has two, and nobody has a density. All weigh alike.
    few, ear = Digits(num_clients=4, partition=ClassesPerClient(2, samples_per_client=4)), Eavesdropper()
    method = uwa(calibration_fraction=0.25)
    nobody = fit(tmp_path / "none", module(), few, method, max_rounds=2, callbacks=[ear])
    assert [tuple(ear.sent[client_id]["mean"].shape) for client_id in range(4)] == [(0, 10)] * 4
    assert nobody.metrics["server/chi"] == 0.25
    assert nobody.metrics["comm/uplink_bytes"] == 4 * 80 * 10 * 4
    # Beside somebody who has one, whoever has none has no say.
    reducer, known = method.mixture(), known.log().clamp_min(-50)
    reducer.add(ClientUpdate(0, ear.sent[0]))
    reducer.add(ClientUpdate(1, {"logits": known, "mean": torch.zeros(1, 10), "variance": torch.ones(1, 10)}))
    torch.testing.assert_close(reducer.result(ALONE).mean, known.double().softmax(1))


def test_densities_of_augmented_private_data_need_no_calibration(tmp_path: Path) -> None:
    made = fit(tmp_path, module(), data(), uwa(density_data="augmented", calibration_fraction=0), max_rounds=1)
    assert made.metrics["server/chi"] > 0.25
    # Every class is there with its 20 samples: 3 × 2 × 10 × 4 bytes.
    assert made.metrics["comm/uplink_bytes"] == 4 * (3200 + 240)


def test_who_is_trusted_is_pictured(tmp_path: Path) -> None:
    made = fit(tmp_path, module(), data(), uwa(), max_rounds=2, logger=True, callbacks=[Dashboard(1)])
    events = EventAccumulator(events_of(made.log_dir), size_guidance={"images": 0})
    events.Reload()
    assert [event.step for event in events.Images("pictures/weights")] == [0, 1]


class Unlabelled(Classifier):
    """Its labels are no classes."""

    def __init__(self) -> None:
        super().__init__(Logistic(10, 1, (1, 8, 8)))

    def targets(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return batch[1].float()


def test_refused_before_any_training(tmp_path: Path) -> None:
    for make, message in (
        (lambda: uwa(calibration_fraction=0), r"algorithm\.calibration_fraction above 0"),
        (lambda: uwa(-0.5), r"algorithm\.temperature is -0\.5"),
        (lambda: uwa(math.nan), r"algorithm\.temperature is nan"),
        (lambda: uwa(density_data="test"), r"algorithm\.density_data is 'test'"),
        (lambda: fit(tmp_path, Unlabelled(), data(), uwa()), "algorithm UWA needs integer class labels"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


def test_trust_beats_the_average_where_clients_know_few_classes(tmp_path: Path) -> None:
    """Ten clients of two classes each: the claim of the paper's Table 1, after 5 rounds on digits."""

    def accuracy(method: FederatedDistillation) -> float:
        torch.manual_seed(0)
        population = Digits(num_clients=10, partition=ClassesPerClient(2, samples_per_client=100), batch_size=32)
        model = Classifier(
            "mlp", num_classes=10, input_shape=(1, 8, 8), optimizer=lambda p: torch.optim.Adam(p, lr=1e-3)
        )
        made = fit(tmp_path / type(method).__name__, model, population, method, max_rounds=5, evaluate_every=5,
                   local_epochs=3, protocols=[ClientGlobalTest()])  # fmt: skip
        return made.metrics["clients_global/acc_mean"]

    work: dict[str, Any] = {"first_epochs": 10, "public_epochs": 3, "public_size": 500, "calibration_fraction": 0.2}
    average, trust = accuracy(FederatedDistillation(**work)), accuracy(UWA(0.25, **work))
    assert trust > average + 0.05, (trust, average)


@pytest.mark.parametrize(
    ("name", "num_classes", "megabytes"),
    # 2,000 × 10 × 4 × 25 and 5,000 × 100 × 4 × 25 bytes: Section 5.4 prints 2 and 50 MB up per client in 25 rounds.
    [("yahoo", 10, 2.0), ("cifar100", 100, 50.0)],
)
def test_the_papers_megabytes_follow_from_its_configurations(name: str, num_classes: int, megabytes: float) -> None:
    settings = yaml.safe_load((ROOT / f"configs/papers/uwa/runs/suwa_{name}.yaml").read_text())
    assert settings["algorithm"]["init_args"]["public_size"] * num_classes * 4 * 25 / 1e6 == megabytes
