"""RAF by hand, its reductions, its teacher without gradient, and over other methods."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lit_fed import objective_of
from lit_fed.errors import ConfigError
from lit_fed.losses import resolution_distillation
from lit_fed.methods import LD, RAF, FedAvg, FedNova, FedProx, FedRAF, PerFedAvg, Prox, Scaffold
from lit_fed.participation import Participation
from lit_fed.poses import UDP, KeypointEstimator
from lit_fed.protocols import GlobalTest
from tests.methods.raf_support import LEVELS, TOP, Scaling, Zooms, estimator, puppets
from tests.methods.support import ByHand, Rota
from tests.support import LeastSquares, assert_same, fit, rows, weights


def weight_of(made: Any) -> float:
    return float(weights(made)["network.weight"])


def one_round(folder: Path, algorithm: Any, task: Any = None, num_clients: int = 1, **kwargs: Any) -> Any:
    return fit(folder, task or Scaling(), Zooms(num_clients), algorithm, max_rounds=1, **kwargs)


# ---------------------------------------------------------------------- by hand


def test_the_distance_by_hand() -> None:
    # A student of 1×2 pixels, nearest neighbours to 2×4: columns 1 1 3 3, twice. The teacher is 2 everywhere: all are
    # off by 1. Three joints of one person, of which the second is off by 3.
    student = torch.tensor([1.0, 3.0]).expand(1, 3, 1, 2).clone().requires_grad_()
    teacher = torch.full((1, 3, 2, 4), 2.0).requires_grad_()
    assert resolution_distillation(student, teacher).item() == 1.0
    with torch.no_grad():
        teacher[:, 1] = torch.tensor([4.0, 4.0, 0.0, 0.0])
    loss = resolution_distillation(student, teacher)
    assert loss.item() == pytest.approx((1 + 9 + 1) / 3)
    loss.backward()
    assert teacher.grad is None
    # 4 pixels of 24 follow a student's: 2·4/24·(1 − 2) = −⅓
    assert student.grad is not None
    torch.testing.assert_close(student.grad[0, 0, 0], torch.tensor([-1 / 3, 1 / 3]))


def test_the_distance_with_bilinear_upsampling_by_hand() -> None:
    # A row of 0 and 4 to four columns: centres at −¼, ¼, ¾, 1¼ of the student's pixels, so 0 1 3 4; nearest: 0 0 4 4.
    student = torch.tensor([0.0, 4.0]).expand(1, 1, 1, 2).clone().requires_grad_()
    enlarged = torch.tensor([0.0, 1.0, 3.0, 4.0]).expand(1, 1, 2, 4)
    assert torch.equal(F.interpolate(student, size=(2, 4), mode="bilinear", align_corners=False), enlarged)
    assert resolution_distillation(student, enlarged, "bilinear").item() == 0
    assert resolution_distillation(student, enlarged).item() == (0 + 1 + 1 + 0) / 4
    loss = resolution_distillation(student, torch.zeros(1, 1, 2, 4), "bilinear")
    assert loss.item() == (0 + 1 + 9 + 16) / 4
    loss.backward()
    # 2·2/8·Σ weight·value: ¼·… of column 1 is ¾ and ¼ of the two pixels, column 2 ¼ and ¾.
    assert student.grad is not None
    assert student.grad.flatten().tolist() == [0.5 * (0.75 * 1 + 0.25 * 3), 0.5 * (0.25 * 1 + 0.75 * 3 + 4)]


@pytest.mark.parametrize("algorithm", [FedRAF(upsampling="bilinear"), FedAvg(regularizer=RAF(upsampling="bilinear"))])
def test_the_upsampling_reaches_the_term(algorithm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def told(student: torch.Tensor, teacher: torch.Tensor, upsampling: Any) -> torch.Tensor:
        asked.append(upsampling)
        return resolution_distillation(student, teacher, upsampling)

    monkeypatch.setattr("lit_fed.methods.raf.resolution_distillation", told)
    one_round(tmp_path, algorithm)
    assert set(asked) == {"bilinear"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # `tests.methods.raf_support`: 1 − (21 + α·2)/32
        ({"alpha": 1.0}, 1 - 23 / 32),
        ({"alpha": 0.5}, 1 - 22 / 32),
        ({"alpha": 0.0}, 1 - 21 / 32),
        # 1 − (21 + 25 + 16 + α·2)/3/32
        ({"alpha": 1.0, "truth": "every"}, 1 - 64 / 96),
        ({"alpha": 0.0, "truth": "every"}, 1 - 62 / 96),
        # The loss is a mean over K·h·w = 1·2·2 outputs, where Eq. 4 sums: 1 − (21 + 2 + γ·w/4)/32
        ({"alpha": 1.0, "gamma": 0.5}, 1 - 23.125 / 32),
    ],
)
def test_one_step_by_hand(tmp_path: Path, settings: dict[str, Any], expected: float) -> None:
    assert weight_of(one_round(tmp_path / "method", FedRAF(**settings))) == pytest.approx(expected, rel=1e-6)
    over = RAF(**{"weight" if name == "alpha" else name: value for name, value in settings.items()})
    assert weight_of(one_round(tmp_path / "over", FedAvg(regularizer=over))) == pytest.approx(expected, rel=1e-6)


def test_what_is_logged_by_hand(tmp_path: Path) -> None:
    metrics = one_round(tmp_path, FedRAF(alpha=0.5, gamma=0.25)).metrics
    assert metrics["train/task"] == 10.5
    assert metrics["train/raf"] == 0.5 * (6 + 1)
    assert metrics["train/l2"] == 0.5 * 0.25 / 4  # of 2×2 outputs
    assert metrics["train/loss"] == 10.5 + 3.5 + 0.03125
    # What the task logs itself is about the client's own resolution: 1 + 3 + 5 + 7.
    assert metrics["train/seen"] == 16
    assert one_round(tmp_path, FedRAF(truth="every")).metrics["train/task"] == pytest.approx((10.5 + 12.5 + 8) / 3)


def test_each_client_distils_from_its_own_resolution_downwards(tmp_path: Path) -> None:
    # Client 0: 1 − 23/32; client 1, from 5 to 4: 1 − (25 − 8)/32; client 2 has the loss alone: 1 − 16/32. Uniform.
    made = one_round(tmp_path, FedRAF(), num_clients=3)
    assert weight_of(made) == pytest.approx(1 - (23 + 17 + 16) / 3 / 32)


def test_without_a_federation_it_is_cl_and_kd(tmp_path: Path) -> None:
    def trained(task: Any, **batch: Any) -> float:
        run = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        run.fit(task, DataLoader([{"image": TOP, **batch}], batch_size=None))  # type: ignore[arg-type]
        return float(task.network.weight)

    lower = [{"image": level} for level in LEVELS]
    assert trained(Scaling(), levels=lower) == 1 - 21 / 32  # CL
    assert trained(objective_of(Scaling(), FedRAF()), levels=lower) == 1 - 23 / 32  # CL + KD
    assert trained(objective_of(Scaling(), FedAvg(regularizer=RAF())), levels=lower) == 1 - 23 / 32
    assert trained(objective_of(Scaling(), FedRAF())) == 1 - 21 / 32  # of the lowest resolution


def test_distances_weigh_as_in_the_code_and_not_as_in_the_paper() -> None:
    # Eq. 5 sums over K·h·w numbers of each teacher; over those of the top level, its second distance weighs 9/16.
    sizes = [(64, 48), (48, 36), (32, 24)]
    maps = [torch.rand(2, 5, *size) for size in sizes]
    larger = [torch.nn.functional.interpolate(low, high.shape[2:]) for high, low in pairwise(maps)]
    summed = [(high - low).square().sum((1, 2, 3)).mean() for high, low in zip(maps, larger, strict=False)]
    paper = [one / (5 * 64 * 48) for one in summed]
    ours = [resolution_distillation(low, high) for high, low in pairwise(maps)]
    assert [float(one / other) for one, other in zip(ours, paper, strict=True)] == pytest.approx([1, 16 / 9])


# Joints at 24×18 pixels: inside; beyond every map by more than 3σ = 6 pixels; beyond the top's (23 < 26), not the lower
# ones' (17 and 8.33, at most 17 and 11); not labelled. Rows are joints.
PLACES = torch.tensor([[5.0, 7.0], [60.0, 5.0], [26.0, 5.0], [9.0, 9.0]])
WEIGHTS = [[1.0, 0, 0, 0], [1.0, 0, 1, 0], [1.0, 0, 1, 0]]  # of the levels
SIZES = [(24, 18), (16, 12), (8, 6)]


class Maps(torch.nn.Module):
    """Four maps as large as an image."""

    stride = 1

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(x)
        return found


def joints_mse(found: torch.Tensor, wanted: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """The loss of RAF's code: each joint's mean square over a batch and its pixels, then the mean over joints."""
    each = [((found[:, k] - wanted[:, k]) * weight).square().mean() for k, weight in enumerate(weights)]
    return torch.stack(each).mean()


@pytest.mark.parametrize("truth", ["top", "every"])
def test_joints_outside_of_the_map_count_as_in_the_code(truth: Any) -> None:
    torch.manual_seed(0)
    task = KeypointEstimator(Maps(), num_joints=4, codec=UDP(stride=1), flip_test=False)
    scale = [torch.tensor([(w - 1) / 17, (h - 1) / 23]) for h, w in SIZES]
    top, *lower = (
        {"image": torch.rand(2, 3, *size), "keypoints": (PLACES * by).expand(2, 4, 2), "head_size": torch.ones(2),
         "visible": torch.tensor([1.0, 1, 1, 0]).expand(2, 4)}
        for size, by in zip(SIZES, scale, strict=True)
    )  # fmt: skip
    levels = [top, *lower]
    assert [task.map_weights(one)[0].tolist() for one in levels] == WEIGHTS
    outputs = [task(one["image"]) for one in levels]
    targets = [task.codec.encode(one["keypoints"], one["visible"], one["image"].shape[2:]) for one in levels]
    truths = [joints_mse(*one) for one in zip(outputs, targets, WEIGHTS, strict=True)]
    taught = [
        joints_mse(torch.nn.functional.interpolate(low, high.shape[2:]), high.detach(), weights)
        for (high, low), weights in zip(pairwise(outputs), WEIGHTS[1:], strict=True)
    ]
    wanted = (sum(truths) + sum(taught)) / 3 if truth == "every" else truths[0] + sum(taught)
    loss = objective_of(task, FedRAF(truth=truth)).training_step(top | {"levels": lower}, 0)
    found = loss["loss"] if isinstance(loss, dict) else loss
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(one, task.network.head.weight)[0] for one in (found, wanted)]
    torch.testing.assert_close(*gradients)


# ---------------------------------------------------------------------- reductions


OVER = {
    "fedavg": lambda **kwargs: FedAvg("uniform", **kwargs),
    "fedprox": lambda **kwargs: FedProx(mu=0.5, **kwargs),
    "scaffold": lambda **kwargs: Scaffold(**kwargs),
    "scaffold1": lambda **kwargs: Scaffold(option=1, **kwargs),
    "fednova": lambda **kwargs: FedNova(**kwargs),
    "per_fedavg": lambda **kwargs: PerFedAvg(**kwargs),
}


@pytest.mark.parametrize("method", OVER)
def test_without_its_weight_it_is_the_method_below(tmp_path: Path, method: str) -> None:
    def run(folder: str, **kwargs: Any) -> dict[str, torch.Tensor]:
        return weights(fit(tmp_path / folder, Scaling(), Zooms(), OVER[method](**kwargs), local_epochs=3))

    plain = run("plain")
    assert_same(plain, run("zero", regularizer=RAF(weight=0.0)))
    with pytest.raises(AssertionError, match="differ"):
        assert_same(plain, run("one", regularizer=RAF(weight=1.0)))


@pytest.mark.parametrize("method", OVER)
@pytest.mark.parametrize("truth", ["top", "every"])
def test_a_client_of_the_lowest_resolution_is_the_method_belows(tmp_path: Path, method: str, truth: Any) -> None:
    def run(folder: str, client: int, **kwargs: Any) -> dict[str, torch.Tensor]:
        class Only(Rota):
            def draw(self, round_idx: int) -> Any:
                return super().draw(client)

        algorithm = OVER[method](**kwargs)
        return weights(fit(tmp_path / folder, Scaling(), Zooms(), algorithm, participation=Only(), local_epochs=3))

    regularizer = RAF(truth=truth)
    assert_same(run("plain", 2), run("lowest", 2, regularizer=regularizer))
    with pytest.raises(AssertionError, match="differ"):
        assert_same(run("plain0", 0), run("highest", 0, regularizer=regularizer))


def test_over_fedprox_by_hand(tmp_path: Path) -> None:
    # From 1 to 1 − 23/32 = 9/32; there the gradient is 9/32 · 23 and μ = 16 times the distance −23/32: 27/32 less than
    # nothing, so w goes back by (9·23 − 16·23)/32/32.
    made = one_round(tmp_path, FedProx(mu=16.0, regularizer=RAF()), local_epochs=2)
    assert weight_of(made) == pytest.approx(9 / 32 - (9 * 23 - 16 * 23) / 32 / 32)


def test_over_scaffold_by_hand(tmp_path: Path) -> None:
    # Three clients whose gradients at w are 23·w, (25 − 8)·w and 16·w: 21 + 2 with two lower resolutions, one, and none
    # (`tests.methods.raf_support`). Two steps of 1/32 a round. Nothing is corrected in the first: they end at (9/32)²,
    # (15/32)² and (16/32)². Then c_i is (1 − w_i)/(2/32), and c their mean.
    ends = [(9 / 32) ** 2, (15 / 32) ** 2, (16 / 32) ** 2]
    controls = [16 * (1 - end) for end in ends]
    begun, mean = sum(ends) / 3, sum(controls) / 3
    second = []
    for slope, control in zip((23, 17, 16), controls, strict=True):
        w = begun
        for _ in range(2):
            w -= (slope * w - control + mean) / 32
        second.append(w)
    made = fit(tmp_path, Scaling(), Zooms(), Scaffold(regularizer=RAF()), local_epochs=2, max_rounds=2)
    assert weight_of(made) == pytest.approx(sum(second) / 3, rel=1e-5)
    assert sum(second) / 3 != pytest.approx(begun**2, rel=1e-2), "what FedAvg makes of it"


def test_a_regularizer_over_it_costs_no_further_pass(tmp_path: Path) -> None:
    # One pass a resolution and step; the global model, which `LD` asks, one more.
    for regularizer, runs in ((None, 3), (Prox(), 3), (LD(), 4)):
        task = Scaling()
        one_round(tmp_path, FedRAF(regularizer=regularizer), task, local_epochs=2, evaluate_every=0)
        probed = 1  # to see that the head runs once
        assert task.runs == probed + 2 * runs


def test_the_lower_resolutions_pass_once_for_truth_and_distillation(tmp_path: Path) -> None:
    task = Scaling()
    one_round(tmp_path, FedRAF(truth="every"), task, evaluate_every=0)
    assert task.runs == 1 + 3


# ---------------------------------------------------------------------- on figures


class FirstHalf(Participation):
    """Clients 0 and 1 only."""

    @property
    def nominal_cohort_size(self) -> int:
        return 2

    def draw(self, round_idx: int) -> Any:
        return np.array([0, 1])


class SecondHalf(FirstHalf):
    """Clients 2 and 3 only."""

    def draw(self, round_idx: int) -> Any:
        return np.array([2, 3])


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_without_its_weight_or_at_the_lowest_resolution_figures_are_learnt_as_by_fedavg(
    tmp_path: Path, norm: str
) -> None:
    def run(algorithm: Any, participation: Any) -> dict[str, torch.Tensor]:
        folder = tmp_path / f"{type(algorithm).__name__}_{type(participation).__name__}"
        settings: dict[str, Any] = {"participation": participation, "evaluate_every": 0}
        return weights(fit(folder, estimator(norm=norm), puppets(), algorithm, **settings))

    plain = run(FedAvg("uniform"), FirstHalf())
    assert_same(plain, run(FedRAF(alpha=0.0), FirstHalf()))
    with pytest.raises(AssertionError, match="differ"):
        assert_same(plain, run(FedRAF(), FirstHalf()))
    assert_same(run(FedAvg("uniform"), SecondHalf()), run(FedRAF(gamma=0.0), SecondHalf()))


def test_what_nobody_sees_is_not_distilled() -> None:
    [batch, *_] = ready(puppets()).train_loader(0, torch.Generator().manual_seed(0))
    task = estimator(drop_path=0.0)

    def distance() -> float:
        found = [task.training_step(one, 0)["logits"] for one in (batch, *task.levels(batch))]
        return float(resolution_distillation(found[1].detach(), found[0]))

    first = distance()
    for one in (batch, *batch["levels"]):
        one["visible"][:] = 0
    assert first > 0 == distance()


def test_any_list_of_resolutions_in_one_evaluation(tmp_path: Path) -> None:
    made = fit(tmp_path, estimator(), puppets(val_fraction=0.34), FedRAF(), max_rounds=1, protocols=[GlobalTest()])
    (row,) = rows(made.log_dir / "metrics.csv")
    assert {name for name in row if name.startswith("global/pck_") and "strict" not in name} == {
        "global/pck_64x48",
        "global/pck_32x24",
    }
    # What is tested without a view is the highest resolution.
    assert row["global/pck"] == row["global/pck_64x48"] != ""
    ways: list[Any] = ["bilinear", "area", "bicubic"]
    data = puppets(val_fraction=0.34, test_resolutions=[(16, 16), (128, 96), (256, 192)], interpolations=ways)
    found = made.validate(estimator(), data, FedRAF(), "last")
    scaled = [f"32x24_as_{size}_{way}" for size in ("128x96", "256x192") for way in ways]
    sizes = ["16x16", "128x96", "256x192", *scaled]
    assert [name for name in found if name.startswith("global/pck_") and "strict" not in name] == [
        *(f"global/pck_{size}" for size in sizes)
    ]
    assert all(0 <= found[f"global/pck_{size}"] <= 100 for size in sizes)


def ready(data: Any) -> Any:
    data.setup()
    return data


# ---------------------------------------------------------------------- refusals


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.alpha is -1; it must be at least 0"):
        FedRAF(alpha=-1)
    with pytest.raises(ConfigError, match=r"RAF\.gamma is -1; it must be at least 0"):
        FedRAF(gamma=-1)
    with pytest.raises(ConfigError, match=r"RAF\.truth is 'all'; it must be 'top' or 'every'"):
        FedAvg(regularizer=RAF(truth="all"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"algorithm\.upsampling is 'area'; it must be 'nearest' or 'bilinear'"):
        FedRAF(upsampling="area")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weight of regularizer RAF is -1"):
        RAF(weight=-1)


def test_either_weight_decay_or_gamma(tmp_path: Path) -> None:
    decays = "has an optimizer of weight_decay 0.1, and {} needs an optimizer without weight decay, .* set weight_decay"
    for algorithm, who in (
        (FedRAF(gamma=0.01), "algorithm FedRAF"),
        (FedProx(regularizer=RAF(gamma=0.01)), "regularizer RAF"),
    ):
        with pytest.raises(ConfigError, match=decays.format(who)):
            one_round(tmp_path, algorithm, Scaling(weight_decay=0.1))
        with pytest.raises(ConfigError, match=decays.format(who)):
            objective_of(Scaling(weight_decay=0.1), algorithm)
        objective_of(Scaling(), algorithm)
    objective_of(Scaling(weight_decay=0.1), FedRAF())


def test_a_task_that_lacks_something_is_refused(tmp_path: Path) -> None:
    class Headless(Scaling):
        head = None  # type: ignore[assignment]

    with pytest.raises(
        ConfigError, match=r"FedRAF needs lower resolutions of a batch: a method levels\(batch\) of the"
    ):
        fit(tmp_path, LeastSquares(), algorithm=FedRAF(head="network"))
    with pytest.raises(ConfigError, match="regularizer RAF needs the head's outputs: name the submodule"):
        one_round(tmp_path, FedAvg(regularizer=RAF()), Headless())
    with pytest.raises(ConfigError, match="ByHand optimises by hand, and algorithm FedRAF needs a loss"):
        fit(tmp_path, ByHand(), algorithm=FedRAF())


@pytest.mark.parametrize("method", [FedRAF(), FedProx(regularizer=RAF())])
def test_data_where_every_client_has_the_lowest_resolution_alone_are_refused(tmp_path: Path, method: Any) -> None:
    who = "algorithm FedRAF" if isinstance(method, FedRAF) else "regularizer RAF"
    data = puppets(clients_per_level=[0, 4])
    with pytest.raises(ConfigError, match=rf"{who} needs several resolutions of a batch, and no client"):
        fit(tmp_path, estimator(), data, method)
    fit(tmp_path, estimator(), puppets(clients_per_level=[1, 3]), method, participation=SecondHalf(), evaluate_every=0)
