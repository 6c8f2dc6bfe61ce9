"""Privacy at client level, by hand on `Points`: client 0 has x=(1,0), y=2, client 1 three times x=(0,1), y=4.

From w = 0 with learning rate ½, client 0 moves by (1, 0) and client 1 by (0, 2).
"""

from __future__ import annotations

import math
import stat
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lit_fed.algorithm import Client
from lit_fed.callbacks import Callback, Run
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.engine.method.wrapper import Attack
from lit_fed.errors import CheckpointError, ClientFailure, ConfigError
from lit_fed.handover.card import facts_of
from lit_fed.methods import FedAvg, FedNova, LocalOnly, Scaffold
from lit_fed.methods.frozen_heads import CalibratedTest
from lit_fed.participation import (
    FullParticipation,
    Participation,
    PoissonParticipation,
    Stragglers,
    UniformParticipation,
    WeightedParticipation,
)
from lit_fed.privacy import ClientLevel
from lit_fed.privacy.accounting import Mechanism
from lit_fed.robust import ALIE, InnerProduct
from lit_fed.trainer import FederatedTrainer
from tests.privacy.support import private, uniform
from tests.support import LeastSquares, Points, Unlucky, Wanderer, events_of, fit, flip_tensor_bit, rows, weights

pytest.importorskip("dp_accounting")
W = "network.weight"
EXECUTORS = pytest.mark.parametrize("executor", ["sequential", "vectorized"])


@EXECUTORS
def test_each_update_is_clipped_and_the_sum_is_divided_by_the_expected_cohort(executor: str, tmp_path: Path) -> None:
    made = fit(tmp_path, algorithm=uniform(), max_rounds=1, executor=executor, **private(0.5))
    # Δ = (1, 0) and (0, 2) become (½, 0) and (0, ½), and q · N = 2.
    assert weights(made)[W].tolist() == [[0.25, 0.25]]
    assert made.metrics["privacy/clipped"] == 1.0
    assert made.metrics["privacy/noise_std"] == 0.0


@pytest.mark.parametrize(
    ("executor", "precision"),
    [*product(["sequential", "vectorized"], ["32-true", "64-true", "bf16-true"]), ("sequential", "bf16-mixed")],
)
def test_an_update_within_the_bound_stays_as_it_is(executor: str, precision: str, tmp_path: Path) -> None:
    made = fit(
        tmp_path, algorithm=uniform(), max_rounds=1, executor=executor, precision=precision, **private(1.5)
    )  # fmt: skip
    # (1, 0) stays, (0, 2) becomes (0, 1.5).
    assert weights(made)[W].tolist() == [[0.5, 0.75]]
    assert made.metrics["privacy/clipped"] == 0.5


@EXECUTORS
def test_model_and_control_variate_are_clipped_together(executor: str, tmp_path: Path) -> None:
    # Option 2 sends Δ and -Δ/(Kη) = -2Δ: (1, 0, -2, 0) of norm √5 and (0, 2, 0, -4) of norm 2√5. With C = √5/2 they are
    # halved and quartered: Δ = (½, 0) and (0, ½), changes (-1, 0) and (0, -1). w = (¼, ¼), c = (2/2) · (-½, -½).
    made = fit(
        tmp_path, algorithm=Scaffold(option=2), max_rounds=1, executor=executor, **private(math.sqrt(5) / 2)
    )  # fmt: skip
    assert torch.allclose(weights(made)[W], torch.tensor([[0.25, 0.25]]), rtol=0, atol=1e-7)
    assert torch.allclose(made.run.federation.server["control"][W], torch.tensor([[-0.5, -0.5]]), rtol=0, atol=1e-7)


def test_who_stays_away_lowers_the_sum_and_not_the_divisor(tmp_path: Path) -> None:
    half = {**private(100.0), "participation": PoissonParticipation(0.5)}
    made = fit(tmp_path, data=Points(4), algorithm=uniform(), max_rounds=1, **half)
    cohort = made.participation.select(0)
    # q · N = 2 whoever comes; clients 0 and 2 move by (1, 0), 1 and 3 by (0, 2).
    expected = sum(
        (np.array([[1.0, 0.0]]) if one % 2 == 0 else np.array([[0.0, 2.0]]) for one in cohort), np.zeros((1, 2))
    )
    assert weights(made)[W].tolist() == (expected / 2).tolist()


def test_a_method_that_scales_by_its_cohort_is_given_the_expected_one(tmp_path: Path) -> None:
    half = {**private(100.0), "participation": PoissonParticipation(0.7)}
    made = fit(tmp_path, data=Points(4), algorithm=Scaffold(option=2), max_rounds=1, **half)
    cohort = made.participation.select(0)
    assert len(cohort) != pytest.approx(2.8), "or the expected cohort would be the one that came"
    # c becomes (qN / N) · (sum / qN), whoever comes: client 0 and 2 change by (-2, 0), 1 and 3 by (0, -4).
    changes = [[-2.0, 0.0] if one % 2 == 0 else [0.0, -4.0] for one in cohort]
    expected = torch.tensor(changes).sum(0, keepdim=True) / 4
    assert torch.allclose(made.run.federation.server["control"][W], expected, rtol=0, atol=1e-6)


def test_the_noise_of_a_round_has_its_stated_deviation(tmp_path: Path) -> None:
    class Wide(LeastSquares):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(40_000))  # unused: nothing but noise reaches it

    made = fit(tmp_path, Wide(), algorithm=uniform(), max_rounds=1, **private(0.5, 3.0))
    noise = weights(made)["bias"].double()
    std = 3.0 * 0.5 / 2  # z C / (q N)
    assert made.metrics["privacy/noise_std"] == std
    # The variance of n normal numbers has the relative standard error sqrt(2/n), their mean std/sqrt(n).
    assert abs(float(noise.var()) / std**2 - 1) < 4 * math.sqrt(2 / len(noise))
    assert abs(float(noise.mean())) < 4 * std / math.sqrt(len(noise))


def test_an_empty_cohort_releases_noise(tmp_path: Path) -> None:
    nobody = {**private(0.5, 1.0), "participation": PoissonParticipation(0.05)}
    made = fit(tmp_path, algorithm=uniform(), max_rounds=1, **nobody)
    assert made.participation.select(0) == []
    assert weights(made)[W].abs().min() > 0
    assert made.run.federation.server["around.privacy"]["releases"] == 1


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (Path.unlink, "is missing, which tells whose states a private run keeps; use"),
        (lambda apart: apart.write_bytes(b""), "is corrupt; use the checkpoint where the run left it"),
        (
            lambda apart: flip_tensor_bit(apart, torch.load(apart, weights_only=True)["clients"]),
            "is corrupt; use the checkpoint where",
        ),
        (lambda apart: torch.save({"clients": 1}, apart), "does not belong to a checkpoint: "),
    ],
    ids=["missing", "empty", "flipped", "foreign"],
)
def test_a_private_run_goes_on_only_with_what_was_kept_apart(
    harm: Callable[[Path], Any], says: str, tmp_path: Path
) -> None:
    settings = private(0.5, 1.0, key_file=str(tmp_path / "run.key"))
    made = fit(tmp_path, algorithm=Scaffold(weighting="uniform"), max_rounds=1, **settings)
    (apart,) = Path(made.run.log_dir).glob("checkpoints/clients/*.apart")
    harm(apart)
    with pytest.raises(CheckpointError) as told:
        fit(tmp_path, algorithm=Scaffold(weighting="uniform"), max_rounds=2, ckpt_path="last", **settings)
    assert str(told.value).startswith(f"{apart} {says}")
    assert "\n" not in str(told.value)


@EXECUTORS
def test_resumed_is_uninterrupted(executor: str, tmp_path: Path) -> None:
    def run(folder: str, rounds: int, **kwargs: Any) -> Any:
        settings = {**private(0.5, 1.0), "participation": PoissonParticipation(0.5)}
        return fit(
            tmp_path / folder, data=Points(8), algorithm=Scaffold(), max_rounds=rounds, executor=executor,
            **settings, **kwargs,
        )  # fmt: skip

    whole = run("whole", 4)
    run("parts", 2)
    resumed = run("parts", 4, ckpt_path="last")
    assert weights(resumed)[W].tolist() == weights(whole)[W].tolist()
    assert resumed.metrics["privacy/epsilon"] == whole.metrics["privacy/epsilon"]


def test_groups_are_one_after_the_other(tmp_path: Path) -> None:
    one, other = (
        weights(fit(tmp_path / name, data=Points(8), algorithm=Scaffold(), executor=name, **private(0.5, 1.0)))[W]
        for name in ("sequential", "vectorized")
    )
    assert torch.allclose(one, other, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- the budget


def test_the_run_stops_before_the_round_that_would_exceed_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(rounds: int, **kwargs: Any) -> Any:
        return fit(tmp_path, algorithm=uniform(), max_rounds=rounds, **private(0.5, None, epsilon=20.0), **kwargs)

    first = run(3)
    assert first.metrics["privacy/epsilon"] > 0
    for _ in range(2):
        again = run(6, ckpt_path="last")
        assert again.run.next_round == 3
        assert weights(again)[W].tolist() == weights(first)[W].tolist()
        assert "3 releases have spent epsilon 20.0 at delta 0.01; the run ends here" in capsys.readouterr().out


def test_a_run_goes_on_with_the_settings_that_it_began_with(tmp_path: Path) -> None:
    def run(folder: str, rounds: int, privacy: dict[str, Any], participation: Any = None, **kwargs: Any) -> Any:
        settings = {**private(**privacy), "participation": participation or PoissonParticipation(0.5)}
        return fit(tmp_path / folder, data=Points(8), algorithm=uniform(), max_rounds=rounds, **settings, **kwargs)

    begun: dict[str, Any] = {"clip_norm": 0.5, "noise_multiplier": None, "epsilon": 20.0}
    run("run", 1, begun)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"epsilon": 21.0}, r"epsilon is 21\.0, and the run began with 20\.0; keep it"),
        ({"epsilon": None, "noise_multiplier": 1.0}, r"epsilon is None, and the run began with 20\.0; keep it"),
        ({"clip_norm": 1.0}, r"clip_norm is 1\.0, and the run began with 0\.5; keep it"),
        ({"key_file": str(tmp_path / "new.key")}, "the noise of the run so far came from the seed: a simulation; keep"),
    ]
    for changed, text in changes:
        with pytest.raises(ConfigError, match=text):
            run("run", 2, begun | changed, ckpt_path="last")
    with pytest.raises(ConfigError, match=r"PoissonParticipation with 2 of 8 .* began with PoissonParticipation and 4"):
        run("run", 2, begun, PoissonParticipation(0.25), ckpt_path="last")


def test_a_run_goes_on_with_its_own_key(tmp_path: Path) -> None:
    def run(key: str | None, rounds: int, **kwargs: Any) -> Any:
        file = None if key is None else str(tmp_path / key)
        return fit(
            tmp_path, algorithm=uniform(), max_rounds=rounds, **private(0.5, 1.0, key_file=file), **kwargs
        )  # fmt: skip

    run("run.key", 2)
    with pytest.raises(ConfigError, match=r"other\.key holds another key than the run began with; name that one"):
        run("other.key", 4, ckpt_path="last")
    with pytest.raises(ConfigError, match=r"key_file is None, and the noise of the run so far came from a key file"):
        run(None, 4, ckpt_path="last")


def test_a_private_run_is_not_continued_without_privacy_nor_another_with_it(tmp_path: Path) -> None:
    fit(tmp_path / "private", algorithm=uniform(), max_rounds=1, **private(0.5, 1.0))
    fit(tmp_path / "plain", algorithm=uniform(), max_rounds=1)
    with pytest.raises(CheckpointError, match=r"from a run with trainer\.privacy, and this one is without it; keep it"):
        fit(tmp_path / "private", algorithm=uniform(), max_rounds=2, ckpt_path="last")
    with pytest.raises(CheckpointError, match=r"from a run without trainer\.privacy, and this one is with it; keep it"):
        fit(tmp_path / "plain", algorithm=uniform(), max_rounds=2, ckpt_path="last", **private(0.5, 1.0))


@pytest.mark.parametrize("with_privacy", [True, False])
def test_a_private_model_is_tested_with_and_without_the_setting(
    with_privacy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fit(tmp_path, algorithm=uniform(), max_rounds=1, **private(0.5, 1.0))
    monkeypatch.setitem(sys.modules, "dp_accounting", None)  # a test needs no accountant
    settings = private(0.5, 1.0) if with_privacy else {}
    other = FederatedTrainer(accelerator="cpu", default_root_dir=str(tmp_path), enable_progress_bar=False, **settings)
    parts = (LeastSquares(), Points(), uniform())
    assert other.test(*parts, ckpt_path="last")["global/loss"] == made.metrics["global/loss"]


class KilledOnce(Callback):
    """Stops the process, as a kill would, after a round was released and before its checkpoint is written."""

    def __init__(self, round_idx: int) -> None:
        self.round_idx = round_idx

    def on_evaluation_start(self, run: Run, round_idx: int) -> None:
        if round_idx == self.round_idx:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", [1, 2])
def test_a_round_that_was_released_and_not_kept_is_released_again_at_no_cost(at: int, tmp_path: Path) -> None:
    def run(folder: str, *callbacks: Callback, **kwargs: Any) -> Any:
        return fit(
            tmp_path / folder, algorithm=uniform(), max_rounds=3, callbacks=list(callbacks),
            **private(0.5, None, epsilon=20.0, key_file=str(tmp_path / f"{folder}.key")), **kwargs,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        run("run", KilledOnce(at))
    resumed = run("run", ckpt_path="last")
    # All three rounds are released, the last one at the last of the budget, and each once.
    assert resumed.run.next_round == 3
    assert resumed.run.federation.server["around.privacy"]["releases"] == 3
    assert len((tmp_path / "run.key").read_text().splitlines()) == 1 + 3


def test_a_repeated_round_that_comes_out_differently_may_not_exceed_the_budget(tmp_path: Path) -> None:
    def run(rate: float, *callbacks: Callback, **kwargs: Any) -> Any:
        return fit(
            tmp_path, LeastSquares(rate), algorithm=uniform(), max_rounds=2, callbacks=list(callbacks),
            **private(0.5, None, epsilon=20.0, key_file=str(tmp_path / "run.key")), **kwargs,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        run(0.5, KilledOnce(1))
    with pytest.raises(ConfigError, match=r"round 1 was released before .*differently now; .*epsilon 20\.0"):
        run(0.01, ckpt_path="last")
    assert len((tmp_path / "run.key").read_text().splitlines()) == 1 + 2


def test_noise_cannot_change_under_way(tmp_path: Path) -> None:
    fit(tmp_path, algorithm=uniform(), max_rounds=1, **private(0.5, 1.0))
    with pytest.raises(ConfigError, match=r"noise_multiplier is 0\.1, and the run began with 1\.0; keep it"):
        fit(tmp_path, algorithm=uniform(), max_rounds=2, **private(0.5, 0.1), ckpt_path="last")


class Alternating(UniformParticipation):
    """Draws the same clients in every round."""

    def draw(self, round_idx: int) -> NDArray[np.int64]:
        return np.arange(self.nominal_cohort_size)


class Moody(PoissonParticipation):
    """Its second round is that of everybody."""

    def select(self, round_idx: int) -> list[int]:
        return list(range(self.num_clients)) if round_idx == 1 else super().select(round_idx)


@pytest.mark.parametrize("participation", [Alternating(1), Moody(0.01)], ids=lambda one: type(one).__name__)
def test_a_sampler_of_the_users_that_draws_differently_gets_no_amplification(
    participation: Participation, tmp_path: Path
) -> None:
    settings = {**private(0.5, 2.0), "participation": participation}
    made = fit(tmp_path, data=Points(8), algorithm=uniform(), max_rounds=2, **settings)
    # Everybody in both rounds, replaced: two releases with noise 1 in units of 2C are one with noise 1 / √2.
    everyone = Mechanism("poisson", 8, 8, 1 / math.sqrt(2)).pld_epsilon({1: 1}, 0.01)
    assert made.metrics["privacy/epsilon"] == pytest.approx(everyone, abs=2e-3)


@pytest.mark.parametrize("sampler", [PoissonParticipation(0.5), UniformParticipation(4), FullParticipation()])
def test_budget_column_and_card_are_one_number_within_the_budget(sampler: Participation, tmp_path: Path) -> None:
    settings = {**private(0.5, None, epsilon=3.0), "participation": sampler}
    made = fit(tmp_path, data=Points(8), algorithm=uniform(), max_rounds=4, **settings)
    spent = [float(row["privacy/epsilon"]) for row in rows(made.log_dir / "metrics.csv")]
    assert spent == sorted(spent)
    assert 2.99 < spent[-1] <= 3.0
    assert f"**ε = {spent[-1]:.6g}**" in (made.log_dir / "privacy.md").read_text()


@pytest.mark.parametrize("key", [None, "run.key"])
def test_the_terminal_says_what_was_spent_and_whom_it_protects(
    key: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = None if key is None else str(tmp_path / key)
    made = fit(
        tmp_path, algorithm=uniform(), max_rounds=2, enable_progress_bar=True, **private(0.5, 2.0, key_file=file)
    )  # fmt: skip
    said = capsys.readouterr().out
    epsilon = made.metrics["privacy/epsilon"]
    (line,) = [line for line in said.splitlines() if line.startswith("round 1 | ")]
    assert f"privacy/epsilon {epsilon:.3g}" in line
    assert any("privacy/epsilon" in line and f"{epsilon:.6g}" in line and "│" in line for line in said.splitlines())
    assert f"privacy     epsilon {epsilon:.6g} at delta 0.01 for one client with all its data" in said
    assert ("a simulation that protects nobody" in said) == (key is None)
    assert ("sent up and down" in said) == (key is None), "bytes tell how many took part"


# ---------------------------------------------------------------------- the key


def test_a_key_decides_noise_and_cohorts_and_is_used_by_one_run(tmp_path: Path) -> None:
    def run(folder: str, key: str, rounds: int = 2, **kwargs: Any) -> Any:
        settings = {**private(0.5, 1.0, key_file=str(tmp_path / key)), "participation": PoissonParticipation(0.5)}
        return fit(tmp_path / folder, data=Points(8), algorithm=uniform(), max_rounds=rounds, **settings, **kwargs)

    one, other = run("one", "a.key"), run("other", "b.key")
    assert weights(one)[W].tolist() != weights(other)[W].tolist()
    assert stat.S_IMODE((tmp_path / "a.key").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match=r"a\.key was used by a run before; name another"):
        run("third", "a.key")
    longer = run("one", "a.key", rounds=4, ckpt_path="last")
    assert longer.run.next_round == 4
    assert len((tmp_path / "a.key").read_text().splitlines()) == 1 + 4


def test_a_key_keeps_what_is_not_private_from_being_written(tmp_path: Path) -> None:
    made = fit(tmp_path, algorithm=uniform(), logger=True, **private(0.5, 1.0, key_file=str(tmp_path / "run.key")))
    assert rows(made.log_dir / "clients.csv") == []
    names = {name.partition("/")[0] for name in rows(made.log_dir / "metrics.csv")[0]}
    assert names == {"round", "global", "privacy", "time"}
    assert "time/local_s" not in rows(made.log_dir / "metrics.csv")[0]
    assert not (made.log_dir / "partition.json").exists()
    tags = EventAccumulator(events_of(made.log_dir)).Reload().Tags()
    assert tags["histograms"] == []
    assert not {"pictures/partition", "pictures/participation"} & set(tags["images"])
    assert {tag.partition("/")[0] for tag in tags["scalars"]} == names - {"round"}
    assert tags["tensors"] == ["custom_scalars__config__", "privacy/text_summary"]  # the layout names these scalars
    key = (tmp_path / "run.key").read_text().split('"')[3]
    for path in made.log_dir.rglob("*"):
        assert path.is_dir() or key.encode() not in path.read_bytes(), path


def test_metrics_of_validation_data_are_withheld_for_they_are_the_clients(tmp_path: Path) -> None:
    def names(folder: str, **kwargs: Any) -> set[str]:
        made = fit(
            tmp_path / folder, data=Points(sizes=(4, 4), val_fraction=0.5), algorithm=uniform(), evaluate_on="val",
            max_rounds=1, **private(0.5, 1.0, **kwargs),
        )  # fmt: skip
        return {name.partition("/")[0] for name in made.metrics}

    assert "global" in names("told")
    assert names("kept", withhold=True) == {"privacy", "time"}


class Sick(FedAvg):
    """Its client 1 fails the first time."""

    needs = frozenset({"loss"})
    fails = True

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        if client.id == 1 and type(self).fails:
            raise OSError("out of battery")
        return super().objective(client, batch)


def test_a_round_that_comes_out_differently_is_another_release(tmp_path: Path) -> None:
    def run(**kwargs: Any) -> Any:
        settings = private(0.5, 1.0, key_file=str(tmp_path / "run.key"))
        return fit(
            tmp_path, data=Points(4), algorithm=Sick(weighting="uniform"), max_rounds=1,
            enable_checkpointing=False, **settings, **kwargs,
        )  # fmt: skip

    # Without a checkpoint the second run repeats round 0, as one that was killed after its release would.
    without = run()
    same = run(ckpt_path="last")
    assert weights(same)[W].tolist() == weights(without)[W].tolist()
    Sick.fails = False
    other = run(ckpt_path="last")
    once, twice = (made.metrics["privacy/epsilon"] for made in (same, other))
    assert once < twice
    # The noise of the two releases differs, or their difference would be client 1's update alone: (0, ½) / 4.
    assert not torch.allclose(weights(other)[W] - weights(without)[W], torch.tensor([[0.0, 0.125]]), atol=1e-3)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"clip_norm": 0.0, "noise_multiplier": 1.0}, r"clip_norm is 0\.0; it must be above 0"),
        ({"clip_norm": 1.0, "epsilon": 0.0}, r"epsilon is 0\.0; it must be above 0"),
        ({"clip_norm": 1.0, "epsilon": -1.0}, r"epsilon is -1\.0; it must be above 0"),
        ({"clip_norm": 1.0, "noise_multiplier": -1.0}, r"noise_multiplier is -1\.0; it must be at least 0"),
        ({"clip_norm": 1.0, "epsilon": 1.0, "delta": 0.0}, r"delta is 0\.0; it must be above 0 and below 1"),
        ({"clip_norm": 1.0, "epsilon": 1.0, "delta": 1.0}, r"delta is 1\.0; it must be above 0 and below 1"),
        ({"clip_norm": 1.0, "epsilon": 1.0, "noise_multiplier": 1.0}, "give exactly one"),
        ({"clip_norm": 1.0}, "give exactly one"),
        ({"clip_norm": math.nan, "epsilon": 1.0}, "clip_norm is nan"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ClientLevel(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"algorithm": FedAvg()}, "FedAvg weighs them by their samples; set algorithm.weighting to uniform"),
        ({"algorithm": FedNova(weighting="uniform")}, "cannot go around FedNova: .* no bound on one client's part"),
        ({"algorithm": LocalOnly()}, "clients of LocalOnly send nothing"),
        ({"protocols": [CalibratedTest()]}, "CalibratedTest, for which clients send tensors past"),
        (
            {"participation": FullParticipation(stragglers=Stragglers(1.0, late="next_round"))},
            r"stragglers\.late is next_round; set it to lost",
        ),
        ({"participation": WeightedParticipation(1)}, "WeightedParticipation, which draws clients by their data"),
        (
            {"module": Wanderer(), "data": Points(sizes=(2, 3))},
            r"buffers that are averaged, such as 'network\.1\..*'; set trainer\.buffers to local or server",
        ),
    ],
)
def test_what_has_no_bounded_sum_is_refused_by_name(parts: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        fit(tmp_path, **({"algorithm": uniform()} | private(0.5, 1.0) | parts))


def test_a_generous_delta_and_a_cohort_without_amplification_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**private(0.5, 1.0), "participation": UniformParticipation(1)}
    settings["privacy"].delta = 0.6
    fit(tmp_path, algorithm=uniform(), max_rounds=1, **settings)
    said = capsys.readouterr().out
    assert "delta is 0.6, above 1/2: that allows one client's data to be published outright; give less" in said
    assert "counts a larger epsilon for UniformParticipation" in said


def test_a_budget_that_no_noise_keeps_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"epsilon is 1e-09; no noise_multiplier up to a million keeps 3 rounds"):
        fit(tmp_path, algorithm=uniform(), max_rounds=3, privacy=ClientLevel(0.5, epsilon=1e-9, delta=1e-30))
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_a_key_does_not_end_by_a_clients_failure(tmp_path: Path) -> None:
    settings = private(0.5, 1.0, key_file=str(tmp_path / "run.key"))
    with pytest.raises(ConfigError, match=r"trainer\.on_client_failure is raise, .*; set it to skip"):
        fit(tmp_path, data=Points(8), algorithm=uniform(), **(settings | {"on_client_failure": "raise"}))
    made = fit(tmp_path, data=Points(8), algorithm=Unlucky(weighting="uniform"), max_rounds=1, **settings)
    assert made.run.next_round == 1
    assert "ends the run" not in (made.log_dir / "privacy.md").read_text()


@pytest.mark.parametrize("attack", [ALIE(fraction=0.2), InnerProduct(fraction=0.2)], ids=lambda one: type(one).__name__)
def test_attackers_that_know_the_others_are_refused(attack: Attack) -> None:
    with pytest.raises(ConfigError, match=r"which trainer\.privacy bounds one by one; leave one out"):
        FederatedTrainer(attack=attack, **private(0.5, 1.0))


def test_a_failing_client_stops_a_private_run_as_any_other(tmp_path: Path) -> None:
    with pytest.raises(ClientFailure, match="client 7 failed in round 0"):
        fit(tmp_path, data=Points(8), algorithm=Unlucky(weighting="uniform"), **private(0.5, 1.0))


# ---------------------------------------------------------------------- the card


def test_the_card_says_what_is_private_for_whom_and_what_is_not(tmp_path: Path) -> None:
    made = fit(tmp_path, algorithm=uniform(), max_rounds=2, **private(0.5, 2.0))
    told = (made.log_dir / "privacy.md").read_text()
    # Everybody takes part: Gaussian noise of multiplier 2, composed twice, is one of multiplier 2 / √2 = √2.
    epsilon, accountant = Mechanism("poisson", 2, 2, math.sqrt(2)).epsilon({1: 1}, 0.01)
    assert f"| accountant | {accountant} |" in told
    assert f"**ε = {epsilon:.6g}** at **δ = 0.01** for one client with all its data" in told
    assert "differ by the data of one client replaced by none" in told
    assert "a client that fails ends the run, which tells that it took part" in told
    assert "**A simulation**" in told
    assert "`clients.csv`" in told
    assert "| noise multiplier | 2 |" in told


def test_an_exported_models_card_has_the_budget(tmp_path: Path) -> None:
    made = fit(tmp_path, algorithm=uniform(), max_rounds=1, **private(0.5, 2.0))
    content = read_checkpoint(made.log_dir / "checkpoints" / "last.ckpt")
    told = facts_of(content, made.log_dir / "checkpoints" / "last.ckpt").wrappers["privacy"]
    assert told["releases"] == 1
    assert float(told["epsilon"]) == pytest.approx(Mechanism("poisson", 2, 2, 2.0).pld_epsilon({1: 1}, 0.01), rel=1e-5)
    assert told["noise_from"] == "the seed: a simulation"
