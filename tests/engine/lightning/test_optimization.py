"""Schedules by steps: within a client's round, or over the run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from lit_fed.callbacks import Callback
from lit_fed.engine.loop.run import Run
from lit_fed.errors import ConfigError
from lit_fed.methods import FedRep
from tests.support import LeastSquares, Points, assert_same, fit, trainer, weights

Maker = Callable[[torch.optim.Optimizer, int], Any]


class Scheduled(LeastSquares):
    """SGD at a rate of 1 with a schedule by steps, made for as many as the trainer says."""

    def __init__(self, schedule: Maker, frequency: int = 1) -> None:
        super().__init__(lr=1.0)
        self.schedule, self.frequency = schedule, frequency
        self.horizons: set[int] = set()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)
        steps = int(self.trainer.estimated_stepping_batches)
        self.horizons.add(steps)
        entry = {"scheduler": self.schedule(optimizer, steps), "interval": "step", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": entry}


class Watched(Scheduled):
    """Takes down the rate and the momentum of each step, by client."""

    def __init__(self, schedule: Maker, frequency: int = 1) -> None:
        super().__init__(schedule, frequency)
        self.rates: list[float] = []
        self.momenta: list[float] = []
        self.steps: list[int] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.momenta.append(optimizer.param_groups[0]["momentum"])
        self.steps.append(self.global_step)


def ramp(optimizer: Any, steps: int) -> Any:
    """Rates 1/8, 2/8, 3/8 and on."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 8)


def warm_up(optimizer: Any, steps: int) -> Any:
    """Rates ¼, ½, ¾, then 1."""
    return lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3)


def warm_up_and_cosine(optimizer: Any, steps: int) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    return lr_scheduler.SequentialLR(
        optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, max(steps - 5, 1))], milestones=[5]
    )


def one_cycle(optimizer: Any, steps: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 1.0, steps)


def chained(optimizer: Any, steps: int) -> Any:
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.MultiStepLR(optimizer, [2, 7])]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def singles(*sizes: int) -> Points:
    """Clients with so many batches of one sample."""
    data = Points(len(sizes), sizes=(sizes[0], sizes[-1]))
    data.batch_size = 1
    return data


def test_a_schedule_by_steps_starts_anew_in_each_round_unless_it_spans_the_run(tmp_path: Path) -> None:
    task = Watched(ramp)
    fit(tmp_path / "round", task, singles(3), max_rounds=2)
    assert task.rates == [1 / 8, 2 / 8, 3 / 8] * 2
    assert task.horizons == {3}
    task = Watched(ramp)
    fit(tmp_path / "run", task, singles(3), max_rounds=2, schedule_steps="run")
    assert task.rates == [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8]
    assert task.steps == [0, 1, 2, 3, 4, 5]
    assert task.horizons == {6}


def test_clients_of_different_lengths_each_have_their_own_steps_of_a_round(tmp_path: Path) -> None:
    task = Watched(warm_up)
    fit(tmp_path, task, singles(2, 1), max_rounds=3, schedule_steps="run")
    # The first takes steps 0 1, 2 3, 4 5; the second 0, 1, 2.
    assert task.rates == [0.25, 0.5, 0.25, 0.75, 1.0, 0.5, 1.0, 1.0, 0.75]
    assert task.horizons == {6, 3}


def test_every_second_step_is_counted_over_the_run(tmp_path: Path) -> None:
    task = Watched(ramp, frequency=2)
    fit(tmp_path, task, singles(3), max_rounds=2, schedule_steps="run")
    assert task.rates == [1 / 8, 1 / 8, 2 / 8, 2 / 8, 3 / 8, 3 / 8]


def test_steps_that_accumulate_batches_are_counted_as_steps(tmp_path: Path) -> None:
    task = Watched(ramp)
    fit(tmp_path, task, singles(3), max_rounds=2, schedule_steps="run", accumulate_grad_batches=2)
    assert task.rates == [1 / 8, 2 / 8, 3 / 8, 4 / 8]  # two batches and one, in each of two rounds


@pytest.mark.parametrize("schedule", [ramp, warm_up, warm_up_and_cosine, one_cycle, chained])
def test_a_schedule_over_the_run_is_torchs_own_without_a_break(tmp_path: Path, schedule: Maker) -> None:
    task = Watched(schedule)
    fit(tmp_path, task, singles(3), max_rounds=4, schedule_steps="run")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5)
    stepped, rates, momenta = schedule(optimizer, 12), [], []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["momentum"])
        optimizer.step()
        stepped.step()
    assert task.rates == rates
    assert task.momenta == momenta


def test_each_phase_of_a_clients_work_has_its_own_steps(tmp_path: Path) -> None:
    class Deep(Watched):
        def __init__(self) -> None:
            super().__init__(ramp)
            self.network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))

    task = Deep()
    fit(tmp_path, task, singles(2), FedRep(personal=["network.1"]), max_rounds=2, schedule_steps="run", protocols=[])
    assert task.rates == [1 / 8, 2 / 8, 1 / 8, 2 / 8, 3 / 8, 4 / 8, 3 / 8, 4 / 8]


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_both_executors_step_by_the_run(tmp_path: Path, executor: Any) -> None:
    class Plain(Scheduled):
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            made["optimizer"].param_groups[0]["momentum"] = 0.0
            return made

    made = fit(tmp_path, Plain(ramp), singles(3, 3), max_rounds=2, schedule_steps="run", executor=executor)
    # A step leaves 1 − rate of the distance, 7/8 · 6/8 · 5/8 in the first round and 4/8 · 3/8 · 2/8 in the second; the
    # mean over both clients goes half the way, for only one of them moves a weight.
    for found, optimum in zip(weights(made)["network.weight"].flatten().tolist(), (2.0, 4.0), strict=True):
        first = optimum * (1 - 0.41015625) / 2
        trained = optimum - (optimum - first) * 0.046875
        assert found == pytest.approx((first + trained) / 2, rel=1e-6)


class Stopping(Callback):
    """Stops the run before a round."""

    def __init__(self, round_idx: int) -> None:
        self.round_idx = round_idx

    def on_round_start(self, run: Run, round_idx: int, plan: Any) -> None:
        if round_idx == self.round_idx:
            raise ConfigError("stopped")


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_a_resumed_run_goes_on_with_the_schedule(tmp_path: Path, executor: Any) -> None:
    settings: dict[str, Any] = {"max_rounds": 4, "schedule_steps": "run", "executor": executor}
    whole = fit(tmp_path / "whole", Scheduled(warm_up_and_cosine), singles(3, 3), **settings)
    with pytest.raises(ConfigError, match="stopped"):
        fit(tmp_path / "parts", Scheduled(warm_up_and_cosine), singles(3, 3), callbacks=[Stopping(2)], **settings)
    resumed = fit(tmp_path / "parts", Scheduled(warm_up_and_cosine), singles(3, 3), ckpt_path="last", **settings)
    assert_same(weights(whole), weights(resumed))


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_federation_that_goes_on_has_the_schedule_of_more_rounds(tmp_path: Path, interval: str) -> None:
    """Whether it is held or loaded: what was made for fewer rounds is not stepped further."""

    class Falling(LeastSquares):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            span = self.trainer.max_epochs if interval == "epoch" else self.trainer.estimated_stepping_batches
            fall = lr_scheduler.CosineAnnealingLR(optimizer, int(span or 1))
            return [optimizer], [{"scheduler": fall, "interval": interval}]

    task, data = Falling(), singles(2)
    held = fit(tmp_path, task, data, max_rounds=2, schedule_steps="run")
    held.max_rounds = 4
    loaded = fit(tmp_path, Falling(), singles(2), max_rounds=4, schedule_steps="run", ckpt_path="last")
    held.fit(task, data, held.run.federation.algorithm)
    assert_same(weights(held), weights(loaded))


class Own(LeastSquares):
    """Steps a scheduler that is not torch's by the number of steps, as those of timm are."""

    class Ramp:
        """Rates 1/8, 2/8, 3/8 and on."""

        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step_update(self, num_updates: int) -> None:
            self.optimizer.param_groups[0]["lr"] = (num_updates + 1) / 8

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def __init__(self) -> None:
        super().__init__(lr=1 / 8)
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": self.Ramp(optimizer), "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(self.global_step)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def test_a_modules_own_step_of_its_schedule_sees_the_steps_of_the_run(tmp_path: Path) -> None:
    task = Own()
    fit(tmp_path, task, singles(2), max_rounds=3, schedule_steps="run")
    assert task.rates == [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8]


def test_what_cannot_span_the_run_is_refused(tmp_path: Path) -> None:
    class Forgetful(Own):
        class Ramp:  # type: ignore[assignment]
            def __init__(self, optimizer: Any) -> None:
                pass

    class ByHand(LeastSquares):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ConfigError, match="scheduler Ramp without state_dict and load_state_dict"):
        fit(tmp_path, Forgetful(), singles(2), schedule_steps="run")
    with pytest.raises(ConfigError, match=r"optimises by hand, so trainer\.schedule_steps has no effect"):
        fit(tmp_path, ByHand(), singles(2), schedule_steps="run")
    with pytest.raises(ConfigError, match=r"trainer\.schedule_steps is 'rounds'; it must be 'round' or 'run'"):
        trainer(tmp_path, schedule_steps="rounds")


TAKES = "model Scheduled: a client takes at most 3 steps in a round, and its schedule by steps starts anew for each "
RISES = "its learning rate still rises at the last step: the warm-up never ends"
LAID = "trainer.schedule_steps=run lays it out over all rounds\n"


@pytest.mark.parametrize(
    ("schedule", "settings", "line"),
    [
        (warm_up_and_cosine, {}, f"{TAKES}client and round; {RISES}; {LAID}"),  # 3 steps of a warm-up of 5
        (warm_up_and_cosine, {"local_epochs": 2}, f"{TAKES.replace('3', '6')}client and round; {LAID}"),
        (one_cycle, {}, f"{TAKES}client and round; {LAID}"),
        (warm_up, {}, f"{TAKES}client and round; {RISES}; {LAID}"),  # ¼ ½ ¾, and 1 would be the fourth
        (warm_up, {"local_steps": 4}, f"{TAKES.replace('3', '4')}client and round; {LAID}"),
        (warm_up_and_cosine, {"schedule_steps": "run"}, ""),  # 6 steps in two rounds
        (
            warm_up_and_cosine,
            {"schedule_steps": "run", "max_rounds": 1},
            f"model Scheduled: its schedule by steps has at most 3 steps in the run, and {RISES}\n",
        ),
    ],
)
def test_a_line_before_training_says_what_a_schedule_by_steps_spans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: Maker, settings: dict[str, Any], line: str
) -> None:
    fit(tmp_path, Scheduled(schedule), singles(1, 3), protocols=[], **settings)
    said = capsys.readouterr().out
    assert line in said
    assert said.count("schedule by steps") == bool(line)


@pytest.mark.parametrize(
    ("schedule", "frequency", "length"),
    [
        (partial(lr_scheduler.CosineAnnealingLR, T_max=4), 1, 0),
        (partial(lr_scheduler.CosineAnnealingLR, T_max=3), 1, 0),  # the rate of the last round is the last one
        (partial(lr_scheduler.CosineAnnealingLR, T_max=2), 1, 2),  # the rate would rise again
        (partial(lr_scheduler.CosineAnnealingLR, T_max=2), 2, 0),
        (partial(lr_scheduler.CosineAnnealingLR, T_max=9), 1, 9),
        (partial(lr_scheduler.LinearLR, total_iters=2), 1, 0),  # a warm-up
        (partial(lr_scheduler.LinearLR, total_iters=5), 1, 5),
        (partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=6), 1, 6),
        (partial(lr_scheduler.StepLR, step_size=3), 1, 0),
    ],
)
def test_a_line_before_training_names_a_schedule_by_rounds_that_is_not_of_the_runs_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: Any, frequency: int, length: int
) -> None:
    class ByRounds(LeastSquares):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": schedule(optimizer), "frequency": frequency}]

    fit(tmp_path, ByRounds(), max_rounds=4, protocols=[])
    said = capsys.readouterr().out
    assert (f"is made for {length} rounds, and the run has 4; " in said) == bool(length)
    assert said.count("is made for") == bool(length)
