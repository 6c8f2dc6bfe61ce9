"""What holds on a GPU: every method's bits, precisions, groups, compiled networks, and files that a CPU reads.

Skipped where there is none, so CI does not run it. With ``LIT_FED_CARD=cpu`` a processor stands in for the GPU, to try
the tests themselves (those of graphs need the GPU).
"""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision
from safetensors.torch import save_file

from lit_fed import Classifier, FederatedTrainer
from lit_fed.command.cli import main
from lit_fed.data import IID, Digits
from lit_fed.errors import ClientFailure, ConfigError
from lit_fed.methods import FedAdam, FedAvg, FedExLoRA
from lit_fed.protocols import ClientTest
from tests.engine.loop.test_across_base import Pretrained, layers
from tests.engine.stranger_support import STRANGERS, Backwards, digits
from tests.engine.test_across_channels_last import Noting, Pictures
from tests.engine.vectorized.test_metrics import assert_close as assert_metrics_close
from tests.engine.vectorized.test_metrics import federate
from tests.methods.run_methods import CONFIGS, METHODS, ON_PUPPETS, words_of
from tests.methods.support import run_quickstart
from tests.methods.test_across_every_method import assert_same_run
from tests.support import LeastSquares, Points, Wanderer, Wandering, assert_same, fit, rows, saved_weights, weights

CARD = os.environ.get("LIT_FED_CARD", "gpu")
pytestmark = pytest.mark.skipif(CARD == "gpu" and not torch.cuda.is_available(), reason="needs a GPU")
EACH = pytest.mark.parametrize("method", METHODS)
GPU: dict[str, Any] = {"accelerator": CARD, "devices": 1}
# Their training draws random numbers on the device itself (dropped paths, noise, pseudo-samples).
DRAW_THERE = {*ON_PUPPETS, "fedgen", "hfedckd"}


@pytest.fixture(autouse=True)
def as_it_was() -> Any:
    """What `trainer.deterministic` turns on in the process."""
    yield
    torch.use_deterministic_algorithms(False)


def run_on(accelerator: str, method: str, root: Path, rounds: int, *more: str) -> Path:
    """A method for some rounds on a few clients; returns the run's folder."""
    main(["fit", *words_of(method, root, rounds), "--trainer.accelerator", accelerator, *more, "--ckpt_path", "last"])
    return root / "lightning_logs" / "version_0"


@EACH
def test_resumed_is_uninterrupted(method: str, tmp_path: Path) -> None:
    sure = ["--trainer.deterministic", "true"]
    whole = run_on(CARD, method, tmp_path / "whole", 4, *sure)
    run_on(CARD, method, tmp_path / "half", 2, *sure)
    assert_same_run(whole, run_on(CARD, method, tmp_path / "half", 4, *sure))


@pytest.mark.parametrize("method", sorted(METHODS.keys() - DRAW_THERE - {"fedfrozen"}))
def test_a_cpu_gives_the_same_up_to_rounding(method: str, tmp_path: Path) -> None:
    """FedFrozen's Adam makes full steps of what is zero but for rounding, attention keys' biases."""
    cpu, gpu = (saved_weights(run_on(where, method, tmp_path / where, 1)) for where in ("cpu", CARD))
    for name, tensor in cpu.items():
        torch.testing.assert_close(gpu[name].cpu(), tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", sorted(DRAW_THERE | {"fedfrozen"}))
def test_random_numbers_of_its_own_change_little(method: str, tmp_path: Path) -> None:
    cpu, gpu = (rows(run_on(where, method, tmp_path / where, 1) / "metrics.csv")[-1] for where in ("cpu", CARD))
    assert cpu.keys() == gpu.keys()
    assert float(gpu["train/loss"]) == pytest.approx(float(cpu["train/loss"]), rel=0.2)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("kind", STRANGERS)
def test_precisions_are_close_and_hand_nothing_on(tmp_path: Path, kind: Any, precision: str) -> None:
    found = []
    for options in ({"precision": "32-true"}, {"precision": precision}, {"precision": precision}):
        torch.manual_seed(0)
        more = {"participation": Backwards()} if len(found) == 2 else {}
        made = fit(tmp_path, kind(), digits(), FedAvg(), max_rounds=1, logger=True, **GPU, **options, **more)
        assert not found or isinstance(made.fabric.strategy.precision, MixedPrecision) == ("mixed" in precision)
        found.append(weights(made))
    if precision != "64-true":  # sums in float64 are exact for narrower numbers alone, and the cohort came backwards
        assert_same(found[1], found[2])
    for name in found[0]:
        assert found[1][name].isfinite().all()
        torch.testing.assert_close(found[0][name].double(), found[1][name].double(), rtol=0.1, atol=0.05)


def test_dropout_and_what_clients_keep_resume_to_the_same_bits(tmp_path: Path) -> None:
    settings: dict[str, Any] = GPU | {"deterministic": True, "seed": 3, "protocols": [ClientTest()]}

    def run(folder: str, rounds: int, **more: Any) -> FederatedTrainer:
        torch.manual_seed(0)
        made = Wanderer()
        return fit(tmp_path / folder, made, Points(sizes=(2, 3)), Wandering(), max_rounds=rounds, **settings, **more)

    whole, _, resumed = run("whole", 4), run("half", 2), run("half", 4, ckpt_path="last")
    assert_same(weights(whole), weights(resumed))


@pytest.mark.parametrize("method", ["ditto", "fedavg", "fedavgm", "feddr_plus", "moon", "scaffold", "suwa"])
def test_groups_are_one_after_the_other_up_to_rounding(method: str, tmp_path: Path) -> None:
    one, other = (
        saved_weights(run_on(CARD, method, tmp_path / executor, 1, "--trainer.executor", executor))
        for executor in ("sequential", "vectorized")
    )
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("settings", [{"compile": True}, {"channels_last": True}], ids=str)
def test_how_a_network_runs_changes_rounding_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    plain, other = (
        weights(fit(tmp_path / str(len(more)), Noting(), Pictures(), FedAvg(), **GPU, **more))
        for more in ({}, settings)
    )
    for name in plain:
        torch.testing.assert_close(other[name], plain[name], rtol=1e-3, atol=1e-3)


def test_a_cpu_goes_on_with_a_gpus_run(tmp_path: Path) -> None:
    run = run_quickstart(tmp_path, "-c", str(CONFIGS / "trainer" / "gpu_bf16.yaml"))
    assert all(tensor.device.type == "cpu" for tensor in saved_weights(run).values())
    assert run == run_quickstart(tmp_path, "--trainer.accelerator", "cpu", "--ckpt_path", "last", rounds=3)
    last = rows(run / "metrics.csv")[-1]
    assert last["round"] == "2"
    assert math.isfinite(float(last["global/loss"]))


def test_auto_takes_the_gpu(tmp_path: Path) -> None:
    assert FederatedTrainer(default_root_dir=str(tmp_path)).fabric.device.type == "cuda"


def test_convolutions_in_groups_pass_the_probe_in_spite_of_tf32(tmp_path: Path) -> None:
    """Of which cuDNN makes use by default; the probe does without, and puts it back."""
    backends: Any = torch.backends  # whose settings have no types
    before = backends.cudnn.conv.fp32_precision
    optimizer = partial(torch.optim.SGD, lr=0.1)
    task = Classifier("small_cnn", num_classes=10, in_channels=1, input_shape=(1, 8, 8), optimizer=optimizer)
    data = Digits(num_clients=4, max_train_samples=160, batch_size=20, partition=IID())
    fit(tmp_path, task, data, FedAvg(), max_rounds=1, executor="vectorized", **GPU)
    assert backends.cudnn.conv.fp32_precision == before == "tf32"


# ---------------------------------------------------------------------- attacks, rules, privacy, metrics

AROUND = [path for room in ("aggregation", "attack") for path in sorted((CONFIGS / room).glob("*.yaml"))]
SURE = ["--trainer.deterministic", "true", "--trainer.participation", "FullParticipation"]


def assert_a_cpus_and_resumes(root: Path, *words: str) -> None:
    """FedAvg on eight clients: four rounds in one go and in two, and one beside a CPU's."""
    whole = run_on(CARD, "fedavg", root / "whole", 4, *SURE, *words)
    run_on(CARD, "fedavg", root / "half", 2, *SURE, *words)
    assert_same(saved_weights(whole), saved_weights(run_on(CARD, "fedavg", root / "half", 4, *SURE, *words)))
    cpu, gpu = (saved_weights(run_on(where, "fedavg", root / where, 1, *SURE, *words)) for where in ("cpu", CARD))
    for name, tensor in cpu.items():
        torch.testing.assert_close(gpu[name].cpu(), tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("path", AROUND, ids=lambda found: found.stem)
def test_rules_and_attacks_are_a_cpus_and_resume(path: Path, tmp_path: Path) -> None:
    assert_a_cpus_and_resumes(tmp_path, "-c", str(path))


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_privacy_adds_a_cpus_noise_and_resumes(executor: str, tmp_path: Path) -> None:
    """It is drawn on the CPU, whatever the clients train on."""
    pytest.importorskip("dp_accounting")
    words = ["--trainer.executor", executor, "--algorithm.weighting", "uniform", "--trainer.privacy", "ClientLevel"]
    for key, value in {"clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.01}.items():
        words += [f"--trainer.privacy.{key}", str(value)]
    assert_a_cpus_and_resumes(tmp_path, *words)


def test_privacy_of_samples_adds_a_cpus_noise_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    words = ["-c", str(CONFIGS / "privacy" / "sample_level.yaml")]
    words += [
        "--trainer.privacy.epsilon",
        "null",
        "--trainer.privacy.noise_multiplier",
        "1.0",
    ]  # of any number of rounds
    assert_a_cpus_and_resumes(tmp_path, *words)


def test_a_secure_sums_grid_is_a_cpus_and_resumes(tmp_path: Path) -> None:
    """Updates are rounded to the grid on the CPU, so that a step of it is all that rounding before can change."""
    assert_a_cpus_and_resumes(tmp_path, "-c", str(CONFIGS / "privacy" / "secure_sum.yaml"))


@pytest.mark.parametrize("method", ["fedavg_asynchronous", "fedasync_asynchronous", "fedbuff_asynchronous"])
def test_clients_in_flight_resume_to_the_same_bits(method: str, tmp_path: Path) -> None:
    sure = ["--trainer.deterministic", "true"]
    whole = run_on(CARD, method, tmp_path / "whole", 4, *sure)
    run_on(CARD, method, tmp_path / "half", 2, *sure)
    assert_same_run(whole, run_on(CARD, method, tmp_path / "half", 4, *sure))


@pytest.mark.parametrize("method", [FedAvg, FedAdam, FedExLoRA])
def test_a_base_from_a_file_is_compared_by_its_bits_and_resumes(method: Any, tmp_path: Path) -> None:
    """Its tensors are in no checkpoint; those that a GPU holds have the file's digests."""
    file = tmp_path / "weights.safetensors"
    save_file(layers(7).state_dict(), file)

    def run(folder: str, rounds: int, **more: Any) -> FederatedTrainer:
        task, data = Pretrained(file), Points(num_clients=6)
        return fit(tmp_path / folder, task, data, method(), max_rounds=rounds, deterministic=True, **GPU, **more)

    whole = run("whole", 4)
    half = run("half", 2).log_dir / "checkpoints" / "last.ckpt"
    assert_same(saved_weights(whole.log_dir), saved_weights(run("half", 4, ckpt_path=str(half)).log_dir))


def test_torchmetrics_in_groups_are_those_of_one_client_after_the_other(tmp_path: Path) -> None:
    assert_metrics_close(*(federate(tmp_path / how, how, **GPU) for how in ("sequential", "vectorized")))


# ---------------------------------------------------------------------- graphs

GRAPH = ["--trainer.compile", "graph"]


@pytest.mark.parametrize("method", sorted(METHODS.keys() - DRAW_THERE))
def test_graphs_give_the_weights_of_the_run_without_them(method: str, tmp_path: Path) -> None:
    sure = ["--trainer.deterministic", "true"]
    plain = saved_weights(run_on(CARD, method, tmp_path / "plain", 2, *sure))
    graph = saved_weights(run_on(CARD, method, tmp_path / "graph", 2, *sure, *GRAPH))
    for name, tensor in plain.items():
        torch.testing.assert_close(graph[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", sorted(DRAW_THERE))
def test_graphs_draw_random_numbers_of_their_own(method: str, tmp_path: Path) -> None:
    """Dropped paths and the like come from the client's seed, at other places of its stream."""
    plain, graph = (
        rows(run_on(CARD, method, tmp_path / str(len(more)), 2, *more) / "metrics.csv")[-1] for more in ([], GRAPH)
    )
    assert plain.keys() == graph.keys()
    assert float(graph["train/loss"]) == pytest.approx(float(plain["train/loss"]), rel=0.2)


@pytest.mark.parametrize("method", ["fedavg", "feddr_plus", "moon", "raf", "scaffold", "suwa"])
def test_resumed_with_graphs_is_uninterrupted(method: str, tmp_path: Path) -> None:
    sure = ["--trainer.deterministic", "true", *GRAPH]
    whole = run_on(CARD, method, tmp_path / "whole", 4, *sure)
    run_on(CARD, method, tmp_path / "half", 2, *sure)
    assert_same_run(whole, run_on(CARD, method, tmp_path / "half", 4, *sure))


@pytest.mark.parametrize("settings", [{"compile": "graph"}, {"executor": "vectorized"}], ids=["graph", "group"])
def test_a_client_that_fails_is_named(settings: dict[str, Any], tmp_path: Path) -> None:
    class Dividing(LeastSquares):
        """Divides the loss by the first input, 0 for the second client."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) / batch[0][:, 0].mean()

    with pytest.raises(ClientFailure, match="client 1 failed in round 0"):
        fit(tmp_path, Dividing(), max_rounds=1, **GPU, **settings)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_graphs_in_other_precisions(precision: str, tmp_path: Path) -> None:
    made = []
    for compile in (False, "graph"):
        torch.manual_seed(0)
        made.append(fit(tmp_path / str(compile), Noting(), Pictures(), precision=precision, compile=compile, **GPU))
    plain, graph = map(weights, made)
    for name in plain:
        torch.testing.assert_close(graph[name], plain[name], rtol=1e-2, atol=1e-2)


def test_a_step_that_waits_for_the_gpu_is_refused(tmp_path: Path) -> None:
    class Waiting(LeastSquares):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float(loss > -1)

    with pytest.raises(ConfigError, match="cannot be recorded"):
        fit(tmp_path, Waiting(), max_rounds=1, compile="graph", **GPU)


def test_transformers_train_in_groups(tmp_path: Path) -> None:
    words = ["-c", str(CONFIGS / "network" / "vit_pocket.yaml"), "--model.init_args.network_args.qkv_bias", "false"]
    one, other = (
        saved_weights(run_on(CARD, "fedavg", tmp_path / executor, 1, *words, "--trainer.executor", executor))
        for executor in ("sequential", "vectorized")
    )
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=1e-3, atol=1e-3)
