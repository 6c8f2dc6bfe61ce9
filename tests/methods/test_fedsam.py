"""FedSAM and MoFedSAM against arithmetic.

Client 0 has x = (1, 0), y = 2, client 1 has x = (0, 1), y = 4; learning rate ½, ρ = ½. A client's gradient has one
entry, below 0, so the perturbation of that weight is −½: a step is w₁ − ½(w₁ − ½ − 2) = ½w₁ + 1.25 or ½w₂ + 2.25.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_fed import Classifier, objective_of
from lit_fed.algorithm import Client
from lit_fed.engine.lightning.compatibility import check_optimization
from lit_fed.engine.lightning.task_trainer import GradientOptions
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedSAM, MoFedSAM, Prox
from lit_fed.protocols import PersonalTest
from tests.engine.vectorized.test_executor import assert_close, digits, federate, pads_to
from tests.methods.support import Automatic, ByHand, global_weight
from tests.methods.test_across_optimizers import documented
from tests.support import LeastSquares, Points, Threes, Wanderer, assert_same, fit, weights


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # Round 0: w₁ = 1.25 and w₂ = 2.25; mean (0.625, 1.125)
    # Round 1: w₁ = 0.3125 + 1.25 = 1.5625 and w₂ = 0.5625 + 2.25 = 2.8125
    #   mean ((1.5625 + 0.625)/2, (1.125 + 2.8125)/2)
    made = fit(tmp_path, algorithm=FedSAM(rho=0.5), max_rounds=2)
    assert global_weight(made) == [1.09375, 1.96875]


def test_the_norm_is_over_all_parameters(tmp_path: Path) -> None:
    # f(x) = w₁x₁ + w₂x₂ + b, client 0 alone: gradient (−2, 0, −2), norm √8, perturbation −(1, 0, 1)/√2 for ρ = 1.
    # There the residual is −√2 − 2, so w₁ = b = ½·(2 + √2) = 1.707107 after one step.
    made = fit(tmp_path, Automatic(), Points(1), FedSAM(rho=1.0), max_rounds=1)
    assert weights(made)["network.bias"].item() == pytest.approx(1.7071068)
    assert weights(made)["network.weight"][0].tolist() == pytest.approx([1.7071068, 0.0])


def test_a_regularizer_is_part_of_both_gradients(tmp_path: Path) -> None:
    # ½·2·‖w − w_g‖²; client 0 alone, two steps. First: g = −2, at −½: (−½ − 2) + 2·(−½) = −3.5 → w₁ = 1.75.
    # Then g = (1.75 − 2) + 2·1.75 = 3.25 > 0, at 2.25: (2.25 − 2) + 2·2.25 = 4.75 → w₁ = 1.75 − 2.375 = −0.625.
    algorithm = FedSAM(rho=0.5, regularizer=Prox(2.0))
    made = fit(tmp_path, data=Points(1), algorithm=algorithm, max_rounds=1, local_epochs=2)
    assert global_weight(made) == [-0.625, 0.0]


def test_momentum_by_hand(tmp_path: Path) -> None:
    # α = ½, Δ = 0. Round 0: half of FedSAM's gradients −2.5 and −4.5: w₁ = 0.625, w₂ = 1.125; mean (0.3125, 0.5625)
    #   Δ = (0 − (0.3125, 0.5625)) / ½ = (−0.625, −1.125)
    # Round 1, client 0: at 0.3125 − ½ the gradient is −2.1875; v = (−1.09375 − 0.3125, −0.5625) = (−1.40625, −0.5625)
    #   w = (0.3125, 0.5625) − ½v = (1.015625, 0.84375)
    # Client 1: at 0.5625 − ½ the gradient is −3.9375; v = (−0.3125, −1.96875 − 0.5625); w = (0.46875, 1.828125)
    #   mean (0.7421875, 1.3359375)
    made = fit(tmp_path, algorithm=MoFedSAM(rho=0.5, alpha=0.5), max_rounds=2)
    assert global_weight(made) == [0.7421875, 1.3359375]
    # Down w and Δ, up w and one number of four bytes; two clients.
    assert (made.metrics["comm/downlink_bytes"], made.metrics["comm/uplink_bytes"]) == (32, 24)


@pytest.mark.parametrize(
    ("method", "known"),
    [
        (lambda: FedSAM(rho=0.0), lambda: FedAvg("uniform")),
        (lambda: MoFedSAM(rho=0.0, alpha=1.0), lambda: FedAvg("uniform")),
        (lambda: MoFedSAM(alpha=1.0), FedSAM),
        (lambda: MoFedSAM(rho=0.0, alpha=0.5), lambda: documented("FedCM")(alpha=0.5, weighting="uniform")),
    ],
    ids=["FedSAM is FedAvg", "MoFedSAM is FedAvg", "MoFedSAM is FedSAM", "MoFedSAM is FedCM"],
)
def test_a_known_method_to_the_bit(tmp_path: Path, method: Any, known: Any) -> None:
    one, other = (
        weights(federate(tmp_path / name, "sequential", make(), max_rounds=3))
        for name, make in (("one", method), ("other", known))
    )
    assert_same(one, other)


class Masks(nn.Dropout):
    """Notes its masks."""

    def __init__(self, seen: list[list[float]]) -> None:
        super().__init__(0.5)
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        mask = super().forward(torch.ones_like(x))
        self.seen.append(mask.flatten().tolist())
        return x * mask


def test_both_passes_have_the_same_masks_and_the_stream_is_fedavgs(tmp_path: Path) -> None:
    found = []
    for algorithm in (FedAvg(), FedSAM()):
        seen: list[list[float]] = []
        module = LeastSquares()
        module.network = nn.Sequential(Masks(seen), nn.Linear(2, 1))
        fit(tmp_path, module, Threes(2), algorithm, local_epochs=3, protocols=[])
        found.append(seen[-2 * 2 * 3 :] if len(found) == 0 else seen[-2 * 2 * 2 * 3 :])  # without the trial's
    once, twice = found
    assert len({tuple(mask) for mask in once}) > 3
    assert twice == [mask for mask in once for _ in range(2)]


def test_batch_norm_counts_the_weights_themselves_and_once(tmp_path: Path) -> None:
    # At a learning rate of 0 the weights stay, and with them the statistics of FedAvg's one pass.
    names = ["running_mean", "running_var", "num_batches_tracked"]
    found = []
    for algorithm in (FedAvg(), FedSAM()):
        torch.manual_seed(0)
        made = fit(tmp_path, Wanderer(lr=0.0), Threes(2), algorithm, local_epochs=3, buffers="average", protocols=[])
        found.append({name: weights(made)[f"network.1.{name}"] for name in names})
    assert_same(*found)
    assert found[0]["num_batches_tracked"] == 6


class Bumpy(nn.Module):
    """Batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x))
        return found


def bumpy() -> Any:
    return Classifier(network=Bumpy(), optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5))


@pytest.mark.parametrize("method", [FedSAM, MoFedSAM])
@pytest.mark.parametrize("task", [None, bumpy], ids=["mlp", "batch norm and dropout"])
def test_in_groups_it_is_one_client_after_the_other(tmp_path: Path, method: Any, task: Any) -> None:
    def run(how: str) -> Any:
        data = digits(drop_last=True) if task else digits()
        return federate(tmp_path / how, how, method(), task, data)

    alone, grouped = run("sequential"), run("vectorized")
    assert pads_to(grouped) == 0, "a perturbation is of a whole batch"
    assert_close(alone, grouped, tolerance=1e-5)


def test_fine_tuning_is_perturbed_too(tmp_path: Path) -> None:
    # After round 0 (0.625, 1.125); one step each: ½·0.625 + 1.25 = 1.5625 and ½·1.125 + 2.25 = 2.8125, ½·0.4375² and
    # ½·1.1875².
    made = fit(tmp_path, algorithm=FedSAM(rho=0.5), max_rounds=1, protocols=[PersonalTest()])
    assert made.metrics["personal/loss_mean"] == pytest.approx((0.4375**2 + 1.1875**2) / 4)


def test_it_trains_under_a_plain_trainer() -> None:
    # x = (1, 0), y = 2: at w₁ = −½ the loss is ½·2.5².
    loss: Tensor = objective_of(LeastSquares(), FedSAM(rho=0.5)).training_step(
        (torch.tensor([[1.0, 0.0]]), torch.tensor([2.0])), 0
    )
    assert loss.item() == 3.125


def test_a_gradient_of_zero_perturbs_nothing(tmp_path: Path) -> None:
    class Flat(FedSAM):
        def objective(self, client: Client, batch: Any) -> Any:
            return {name: 0 * term for name, term in super().objective(client, batch).items()}

    assert global_weight(fit(tmp_path, algorithm=Flat(), max_rounds=1)) == [0.0, 0.0]


def test_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.rho is -1"):
        FedSAM(rho=-1.0)
    with pytest.raises(ConfigError, match=r"algorithm\.alpha is 0"):
        MoFedSAM(alpha=0.0)
    with pytest.raises(ConfigError, match="ByHand optimises by hand, and algorithm FedSAM needs a loss"):
        fit(tmp_path, ByHand(), algorithm=FedSAM())
    with pytest.raises(ConfigError, match="algorithm FedSAM needs whole batches, which strategy=ddp would cut"):
        check_optimization(LeastSquares(), FedSAM(), data_parallel=True, gradients=GradientOptions())


@pytest.mark.parametrize(("precision", "digits"), [("64-true", 0.3), ("32-true", float(torch.tensor(0.3)))])
def test_the_length_of_the_steps_has_the_digits_of_the_run(tmp_path: Path, precision: Any, digits: float) -> None:
    # Of three steps at 0.1; 0.3 in float32 is 0.30000001192.
    sent: list[float] = []

    class Listens(MoFedSAM):
        def step(self, server: Any, aggregate: Any, cohort: Any) -> Any:
            sent.append(float(aggregate["distance"]))
            return super().step(server, aggregate, cohort)

    task = LeastSquares(lr=0.1)
    fit(tmp_path, task, algorithm=Listens(), max_rounds=1, local_epochs=3, precision=precision, evaluate_every=0)
    assert sent == pytest.approx([digits], abs=1e-15)
