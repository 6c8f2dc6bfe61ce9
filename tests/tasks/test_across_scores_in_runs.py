"""Scores of a federation: merged for the global model, a mean over clients beside it, over executors and machines."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from sklearn.utils.class_weight import compute_class_weight
from torchmetrics import classification as of_classes

from lit_fed import Classifier, FederatedTrainer
from lit_fed.callbacks import Checkpoint
from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.errors import ConfigError
from lit_fed.methods import DotRegression, FedAvg, FedDrPlus, FedETF, FedLC, FedROD, FedRS, SphereFed
from lit_fed.participation import PoissonParticipation
from lit_fed.privacy import ClientLevel, SampleLevel
from tests.federation.support import deploy, small
from tests.support import assert_same, fit, rows, run_cli, weights

NAMES: Any = ["auroc", "balanced_accuracy", "f1", "average_precision"]
ALL: dict[str, Any] = {
    "acc": of_classes.BinaryAccuracy,
    "auroc": of_classes.BinaryAUROC,
    "balanced_accuracy": lambda: of_classes.MulticlassRecall(2, average="macro"),
    "f1": of_classes.BinaryF1Score,
    "average_precision": of_classes.BinaryAveragePrecision,
}
SIZES = (30, 21, 50, 12, 9, 9, 8, 8)


class Patients(TensorDataModule):
    """Eight clients with a quarter of positive samples; client 3 tests on none. Batches of 16 divide the tests."""

    input_shape = (3,)
    num_classes: int | None = 2

    def __init__(self) -> None:
        super().__init__(num_clients=len(SIZES), partition=Natural(), batch_size=8, test_batch_size=16)

    def load_arrays(self) -> Arrays:
        drawn = np.random.default_rng(1)
        clients = np.repeat(np.arange(len(SIZES)), SIZES)
        parts = []
        for part in ("train", "test"):
            x = drawn.normal(size=(len(clients), 3)).astype(np.float32)
            y = self.targets_of(x + drawn.normal(size=x.shape).astype(np.float32))
            if part == "test":
                y[clients == 3] = 0
            parts += [x, y]
        return Arrays(*parts, clients, clients, "patients")

    def targets_of(self, x: Any) -> Any:
        return (x.sum(axis=1) > 1.6).astype(np.int64)


class Diagnoses(Patients):
    """With two labels a sample."""

    num_classes = None
    output_shape = (2,)

    def targets_of(self, x: Any) -> Any:
        return (x[:, :2] > [0.8, 0.2]).astype(np.float32)


def classifier(**kwargs: Any) -> Classifier:
    torch.manual_seed(0)
    given: dict[str, Any] = {"network": "mlp", "network_args": {"hidden": [8]}, "input_shape": (3,), "metrics": NAMES}
    return Classifier(**(given | {"num_classes": 2, "optimizer": lambda p: torch.optim.SGD(p, lr=0.3)} | kwargs))


def diagnoses(**kwargs: Any) -> Classifier:
    return classifier(num_classes=None, labels=["flu", "gout"], **kwargs)


def pooled(made: FederatedTrainer, module: Classifier, data: Patients) -> dict[str, float]:
    """The scores of torchmetrics on all predictions of the global model at once."""
    module.load_state_dict(weights(made))
    module.eval()
    batches = list(data.test_loader())
    with torch.no_grad():
        p = torch.cat([module.predict_step(batch, 0)["probability"] for batch in batches])
    y = torch.cat([y for _, y in batches])
    found = {}
    for at, label in enumerate(module.labels or [""]):
        own, wanted = (p[:, at], y[:, at].long()) if label else (p[:, 1], y)
        for name in [*(["acc"] if label else []), *NAMES]:
            metric = ALL[name]()
            metric.update((own > 0.5).long() if name == "balanced_accuracy" else own, wanted)
            found[f"global/{name}{'_' * bool(label)}{label}"] = float(metric.compute())
    return found


@pytest.mark.parametrize("executor", ["sequential", "vectorized", "auto"])
@pytest.mark.parametrize(("make", "data"), [(classifier, Patients), (diagnoses, Diagnoses)])
def test_of_the_global_model_they_are_those_of_all_predictions_at_once(
    tmp_path: Path, executor: Any, make: Any, data: Any
) -> None:
    made = fit(tmp_path, make(), data(), executor=executor)
    expected = pooled(made, make(), made.run.federation.data)  # type: ignore[arg-type]
    assert {name: made.metrics[name] for name in expected} == expected
    assert made.test(*made._parts)["global/loss"] == made.metrics["global/loss"]  # type: ignore[misc]


@pytest.mark.parametrize(("make", "data"), [(classifier, Patients), (diagnoses, Diagnoses)])
def test_over_nodes_they_are_the_simulations(tmp_path: Path, make: Any, data: Any) -> None:
    made = deploy(small(make, data), tmp_path, [[0, 1, 2, 3], [4, 5, 6, 7]])
    expected = pooled(made, make(), made.run.federation.data)  # type: ignore[arg-type]
    assert {name: made.metrics[name] for name in expected} == expected
    alone = fit(tmp_path / "alone", make(), data())
    assert {n: v for n, v in made.metrics.items() if n.startswith(("global", "clients"))} == pytest.approx(
        {n: v for n, v in alone.metrics.items() if n.startswith(("global", "clients"))}, nan_ok=True
    )


CONFIG = """
trainer: {accelerator: cpu, max_rounds: 2, num_threads: 1, logger: false, enable_progress_bar: false}
data: {class_path: tests.tasks.test_across_scores_in_runs.Patients}
model:
  class_path: Classifier
  init_args: {network: logistic, class_weights: balanced, metrics: [auroc, balanced_accuracy, f1, average_precision]}
algorithm: {class_path: FedAvg}
"""


@pytest.mark.long
def test_two_processes_merge_their_states(tmp_path: Path) -> None:
    """Each process sees some of the batches; the states merge to those of one process, to the bit."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    found = []
    for devices in ("1", "2"):
        done = run_cli("fit", "-c", "run.yaml", "--trainer.devices", devices, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        metrics = rows(tmp_path / f"lightning_logs/version_{len(found)}/metrics.csv")[-1]
        found.append({name: value for name, value in metrics.items() if name.startswith(("global", "clients"))})
    assert found[0].keys() >= {f"global/{name}" for name in NAMES}
    for name in NAMES:  # of integers and of ranks
        assert found[0][f"global/{name}"] == found[1][f"global/{name}"]
    assert {n: float(v) for n, v in found[0].items()} == pytest.approx(
        {n: float(v) for n, v in found[1].items()}, nan_ok=True
    )


def test_a_mean_over_clients_leaves_out_a_client_without_a_class_and_counts_it(tmp_path: Path) -> None:
    made, data, module = fit(tmp_path, classifier(), Patients()), Patients(), classifier()
    module.load_state_dict(weights(made))
    data.setup()
    own = {}
    for client_id in range(len(SIZES)):
        x, y = (torch.cat(parts) for parts in zip(*data.test_loader(client_id), strict=True))
        if len(y.unique()) == 2:
            own[client_id] = roc_auc_score(y, module.predict_step(x, 0)["probability"][:, 1].detach())
    told = {row["client_id"]: float(row["value"]) for row in rows(made.log_dir / "clients.csv")[-200:] if
            row["metric"] == "auroc" and row["stage"] == "test" and row["round"] == "1"}  # fmt: skip
    assert math.isnan(told["3"])
    assert {int(client): value for client, value in told.items() if not math.isnan(value)} == pytest.approx(own)
    assert made.metrics["clients/auroc_missing"] == len(SIZES) - len(own)
    assert made.metrics["clients/auroc_mean"] == pytest.approx(np.mean(list(own.values())))
    assert made.metrics["clients/auroc_mean"] != pytest.approx(made.metrics["global/auroc"], abs=1e-3)


def test_the_first_score_chooses_the_best_round(tmp_path: Path) -> None:
    made = fit(tmp_path, classifier(metrics=["f1", "auroc"]), Patients())
    (checkpoint,) = (one for one in made.callbacks if isinstance(one, Checkpoint))
    assert made.run.names.choice == "global/f1"
    assert list(classifier(metrics=["f1", "auroc"]).metrics) == ["f1", "auroc", "acc", "loss"]
    values = [float(row["global/f1"]) for row in rows(made.log_dir / "metrics.csv")]
    assert checkpoint.best_round == values.index(max(values))


# ---------------------------------------------------------------------- weights of classes


@pytest.mark.parametrize(
    ("make", "data", "given"),
    [(classifier, Patients, "balanced"), (classifier, Patients, [1.0, 5.0]), (diagnoses, Diagnoses, [2.0, 4.0])],
)
def test_groups_weigh_as_clients_one_after_the_other(tmp_path: Path, make: Any, data: Any, given: Any) -> None:
    """Eight clients of unequal sizes, whose last batches have 1 to 8 samples."""
    one, group, unweighed = (
        weights(fit(tmp_path / name, make(class_weights=w), data(), executor=executor, local_epochs=2))
        for name, executor, w in (("one", "sequential", given), ("group", "vectorized", given), ("no", "auto", None))
    )
    assert all(torch.allclose(one[name], group[name], atol=2e-6) for name in one)
    assert not all(torch.allclose(one[name], unweighed[name], atol=1e-3) for name in one)


@pytest.mark.parametrize(("make", "data", "given"), [(classifier, Patients, "balanced"), (diagnoses, Diagnoses, None)])
def test_resumed_is_uninterrupted(tmp_path: Path, make: Any, data: Any, given: Any) -> None:
    whole = fit(tmp_path / "whole", make(class_weights=given), data(), max_rounds=4)
    first = fit(tmp_path / "part", make(class_weights=given), data(), max_rounds=2)
    last = str(first.log_dir / "checkpoints" / "last.ckpt")
    rest = fit(tmp_path / "part", make(class_weights=given), data(), max_rounds=4, ckpt_path=last)
    assert_same(weights(whole), weights(rest))
    assert {n: v for n, v in whole.metrics.items() if n.startswith(("global", "clients", "train"))} == pytest.approx(
        {n: v for n, v in rest.metrics.items() if n.startswith(("global", "clients", "train"))}, rel=0, nan_ok=True
    )


def test_balanced_weights_come_from_all_clients_counts(tmp_path: Path) -> None:
    module, data = classifier(class_weights="balanced"), Patients()
    fit(tmp_path, module, data)
    labels = data.load_arrays().train.y  # all of which train
    expected = compute_class_weight("balanced", classes=np.array([0, 1]), y=labels)
    assert module.weights_in_loss is not None
    assert module.weights_in_loss.tolist() == pytest.approx(expected.tolist())
    assert data.balanced_weights() == pytest.approx(expected.tolist())


def test_a_node_knows_its_own_clients_counts_only(tmp_path: Path) -> None:
    make = small(lambda: classifier(class_weights="balanced"), Patients)
    with pytest.raises(ConfigError, match=r"'balanced' needs the counts of all clients; give a list, by lit-fed st"):
        deploy(make, tmp_path, [[0, 1, 2, 3], [4, 5, 6, 7]])


@pytest.mark.parametrize(
    ("level", "message"),
    [
        (ClientLevel, r"trainer\.privacy: model\.class_weights are counted over all clients' classes; give a list"),
        (SampleLevel, r"trainer\.privacy: the model or a callback reads balanced_weights of self\.trainer\.datamodule"),
    ],
)
def test_a_private_run_is_given_its_weights(tmp_path: Path, level: Any, message: str) -> None:
    private: Any = {"privacy": level(clip_norm=1.0, noise_multiplier=1.0)}
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, classifier(class_weights="balanced"), Patients(), **private)
    assert not list(tmp_path.glob("lightning_logs/*"))


def test_under_privacy_of_samples_a_weighed_mean_is_refused_and_of_clients_it_trains(tmp_path: Path) -> None:
    """A weighed mean divides by the weights of the batch, so that a sample moves what others add."""
    privacy: Any = {"clip_norm": 1.0, "noise_multiplier": 0.1}
    module = partial(classifier, network="logistic", network_args=None, class_weights=[1.0, 3.0])
    with pytest.raises(
        ConfigError, match=r"trainer\.privacy: .* mixes the samples of a batch: the loss .* not the mean"
    ):
        fit(tmp_path, module(), Patients(), FedAvg("uniform"), privacy=SampleLevel(**privacy))
    fraction = PoissonParticipation(fraction=0.5)
    made = fit(
        tmp_path, module(), Patients(), FedAvg("uniform"), privacy=ClientLevel(**privacy), participation=fraction
    )
    assert made.run.next_round == 2


@pytest.mark.parametrize("method", [FedLC, FedRS, FedROD, FedETF, SphereFed, DotRegression, FedDrPlus])
def test_a_method_with_a_loss_of_its_own_refuses_weights_that_it_would_drop(tmp_path: Path, method: Any) -> None:
    line = (
        f"algorithm {method.__name__} needs a model without class_weights, because it puts a loss of its own in place"
    )
    with pytest.raises(ConfigError, match=line):
        fit(tmp_path, classifier(class_weights=[1.0, 2.0]), Patients(), method())
