"""State by which a sample would reach others: refused by name before the run, or undone under a key.

Modules keep state in every place that a module has. None of them names what it keeps to lit_fed.
"""

from __future__ import annotations

import collections
import copy
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning import Callback
from torch import Tensor, nn

from lit_fed.data import Arrays
from lit_fed.errors import ClientFailure, ConfigError, LitFedError
from lit_fed.privacy import SampleLevel
from lit_fed.privacy.sample_gradients import SampleGradients
from lit_fed.privacy.state_snapshot import StateSnapshot
from lit_fed.tasks import Classifier
from tests.privacy.support import uniform
from tests.privacy.test_sample_gradients import PICTURES, run
from tests.support import LeastSquares, Points, fit, weights

pytest.importorskip("dp_accounting")


class Keeping(Classifier):
    """Adds to the loss what it keeps of other samples; what that is, `keep` says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prepare()

    def prepare(self) -> None:
        """Make the state."""

    def keep(self, logits: Tensor) -> Any:
        """Change the state by logits; returns a shift of them."""
        return 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        return F.cross_entropy(logits + self.keep(logits.detach().mean(0)), batch[1])


class FrozenAverage(Keeping):
    def prepare(self) -> None:
        self.average = nn.Parameter(torch.zeros(3), requires_grad=False)

    def keep(self, logits: Tensor) -> Any:
        return self.average.mul_(0.9).add_(logits)


class FrozenByData(FrozenAverage):
    def keep(self, logits: Tensor) -> Any:
        self.average.data.mul_(0.9).add_(logits)  # past the tensor's version
        return self.average


class FrozenReplaced(FrozenAverage):
    def keep(self, logits: Tensor) -> Any:
        self.average.data = self.average.data + logits
        return self.average


class Queue(Keeping):
    def prepare(self) -> None:
        self.queue: Any = collections.deque(maxlen=4)

    def keep(self, logits: Tensor) -> Any:
        self.queue.append(logits)
        return torch.stack(list(self.queue)).mean(0)


class Centre(Keeping):
    def prepare(self) -> None:
        self.register_buffer("centre", torch.zeros(3), persistent=False)

    def keep(self, logits: Tensor) -> Any:
        self.centre = 0.9 * self.centre + logits
        return -self.centre


class Numbers(Keeping):
    def prepare(self) -> None:
        self.seen = {"train": {"mean": 0.0}}

    def keep(self, logits: Tensor) -> Any:
        self.seen["train"]["mean"] += float(logits.mean())
        return self.seen["train"]["mean"] * torch.arange(3)


class Outputs(Keeping):
    def prepare(self) -> None:
        self.outputs: list[Tensor] = []

    def keep(self, logits: Tensor) -> Any:
        self.outputs.append(logits)


class Drawing(Keeping):
    def prepare(self) -> None:
        self.draws = torch.Generator().manual_seed(0)

    def keep(self, logits: Tensor) -> Any:
        return torch.rand(3, generator=self.draws)


class DrawingNumPy(Keeping):
    def prepare(self) -> None:
        self.draws = np.random.default_rng(0)

    def keep(self, logits: Tensor) -> Any:
        return self.draws.random()


class DrawingPython(Keeping):
    def keep(self, logits: Tensor) -> Any:
        return random.random() * torch.arange(3)


class Bank(Keeping):
    def prepare(self) -> None:
        self.bank = torch.zeros(8, 3)

    def keep(self, logits: Tensor) -> Any:
        self.bank.data[0] = logits + float(logits.sum())
        return self.bank.mean(0)


class LateBuffer(Keeping):
    def keep(self, logits: Tensor) -> Any:
        self.register_buffer("late", logits)


class Teacher(Keeping):
    def prepare(self) -> None:
        self.teachers = [copy.deepcopy(self.network).requires_grad_(False)]  # not a submodule

    def keep(self, logits: Tensor) -> Any:
        for own, other in zip(self.teachers[0].parameters(), self.network.parameters(), strict=True):
            own.mul_(0.9).add_(other.detach(), alpha=0.1)


class Cached(Keeping):
    def prepare(self) -> None:
        self.first: Tensor | None = None

    def keep(self, logits: Tensor) -> Any:
        self.first = logits if self.first is None else self.first
        return -self.first


class OfObject(Keeping):
    def prepare(self) -> None:
        self.kept = SimpleNamespace(mean=0.0)

    def keep(self, logits: Tensor) -> Any:
        self.kept.mean += float(logits.mean())


class OfClass(Keeping):
    means: list[float] = []  # noqa: RUF012  # shared on purpose

    def keep(self, logits: Tensor) -> Any:
        self.means.append(float(logits.mean()))


class RateByLoss(Keeping):
    def keep(self, logits: Tensor) -> Any:
        self.optimizers().param_groups[0]["lr"] = 0.1 * float(logits.mean())


class OfTrainer(Keeping):
    def keep(self, logits: Tensor) -> Any:
        self.trainer.mean = float(logits.mean())


class OfCallback(Keeping):
    def keep(self, logits: Tensor) -> Any:
        self.trainer.callbacks[0].means.append(float(logits.mean()))


class Means(Callback):
    def __init__(self) -> None:
        self.means: list[float] = []


class WeightsOfClasses(Keeping):
    def setup(self, stage: str) -> None:
        self.of_classes = self.trainer.datamodule.class_counts(0)


STATE: dict[type[Keeping], str] = {
    FrozenAverage: "'average'", FrozenByData: "'average'", FrozenReplaced: "mixes the samples",
    Queue: "'queue'", Centre: "'centre'", Numbers: "'seen.train.mean'", Outputs: "'outputs'", Drawing: "'draws'",
    DrawingNumPy: "'draws'", DrawingPython: "Python's generator (random)", Bank: "'bank'", LateBuffer: "'late'",
    Teacher: "'teachers[0].1.weight'", Cached: "'first'", OfObject: "'kept.mean'", OfClass: "'OfClass.means'",
    RateByLoss: "'optimizers[0].param_groups[0].lr'", OfTrainer: "'trainer.mean'",
    OfCallback: "'trainer.callbacks[0].means'", WeightsOfClasses: "class_counts of self.trainer.datamodule",
}  # fmt: skip


@pytest.mark.parametrize("task", STATE, ids=lambda task: task.__name__)
def test_a_step_that_keeps_state_is_refused_by_its_name_before_the_run(task: type[Keeping], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        run(tmp_path, PICTURES["linear"](), task=task, callbacks=[Means()])
    assert STATE[task] in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "lightning_logs").exists(), "before anything of the run"


class EveryEpoch(Keeping):
    temperature = 1.0

    def on_train_epoch_end(self) -> None:
        self.temperature *= 0.9


class AtTheEnd(Keeping):
    def on_train_end(self) -> None:
        self.network[1].weight.data.mul_(0.5)


class ClassesAtTheStart(Keeping):
    def on_train_start(self) -> None:
        self.of_classes = [y for _, y in self.trainer.datamodule.train_loader(0, torch.Generator())]


class Scaling(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.scale = trainer.current_epoch


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (EveryEpoch, "the hook on_train_epoch_end changes 'temperature'"),
        (AtTheEnd, "the hook on_train_end changes 'network.1.weight'"),
        (ClassesAtTheStart, "reads train_loader of self.trainer.datamodule"),
        (Keeping, "the hook on_train_epoch_end changes 'scale'"),
    ],
)
def test_a_hook_that_changes_state_is_refused_by_its_name(task: type[Keeping], says: str, tmp_path: Path) -> None:
    with pytest.raises(ClientFailure) as error:
        run(tmp_path, PICTURES["linear"](), task=task, callbacks=[Scaling()] if task is Keeping else [])
    assert says in str(error.value)


class OptimizersRate(Keeping):
    def keep(self, logits: Tensor) -> Any:
        return self.optimizers().param_groups[0]["lr"]


def test_a_step_may_read_its_optimizer(tmp_path: Path) -> None:
    run(tmp_path, PICTURES["linear"](), task=OptimizersRate)


DRAWS = {
    "randn_like": lambda x: x + torch.randn_like(x), "rand": lambda x: x * torch.rand(len(x), 1, 1, 1),
    "randperm": lambda x: x + x[torch.randperm(len(x))], "dropout2d": F.dropout2d,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_a_step_that_draws_random_numbers_is_refused_by_their_name(name: str, tmp_path: Path) -> None:
    class Drawing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(DRAWS[name](batch[0])), batch[1])

    with pytest.raises(ConfigError, match=f"it draws random numbers by torch's {name}, which differ between a batch"):
        run(tmp_path, PICTURES["linear"](), task=Drawing)


# ---------------------------------------------------------------------- under a key, where a refusal would tell


class Odd(Points):
    """A client of four samples, all of them in each batch; of the third, only the second feature is not 0, or none."""

    def __init__(self, there: bool) -> None:
        super().__init__(1)
        self.there, self.batch_size = there, 8

    def load_arrays(self) -> Arrays:
        x = np.float32([[1, 0], [2, 0], [0, 10 * self.there], [3, 0]])
        y, clients = np.array([1, 2, 4, 3]), np.zeros(4, np.int64)
        return Arrays(x, y, x, y, clients, clients, "odd")


class Fails(LeastSquares):
    """Fails on the odd sample."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if float(batch[0][:, 1].sum()) > 1:
            raise ValueError("row 3 of the table")
        return super().loss(batch)


class Remembers(LeastSquares):
    """Scales the loss by what it has seen of the odd sample: samples before it, after it, and of later steps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = [1.0]

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.scale[0] * super().loss(batch)
        if float(batch[0][:, 1].sum()) > 1:
            self.scale[0] = 0.25
        return loss


class Writes(LeastSquares):
    """The same by the memory of a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = float(self.scale) * super().loss(batch)
        if float(batch[0][:, 1].sum()) > 1:
            self.scale.data.fill_(0.25)
        return loss


def trained(folder: Path, task: LeastSquares, there: bool, key: bool = True) -> list[float]:
    """Weights after two rounds of two steps without noise; the odd sample is not looked at before the run."""
    folder.mkdir(parents=True)
    privacy = SampleLevel(100.0, 0.0, delta=0.2, key_file=str(folder / "key") if key else None)
    made = fit(folder, task, Odd(there), uniform(), max_rounds=2, local_epochs=2, privacy=privacy,
               on_client_failure="skip" if key else "raise", evaluate_every=0)  # fmt: skip
    return weights(made)["network.weight"][0].tolist()


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial before the run sees two samples, neither of them odd, and takes them in turn."""
    monkeypatch.setattr("lit_fed.privacy.sample_level._COMPARED", 2)


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("task", [Fails, Remembers, Writes])
def test_under_a_key_an_odd_sample_moves_nothing_of_the_others_and_nothing_fails(
    task: type[LeastSquares], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_it, without = (trained(tmp_path / str(there), task(), there) for there in (True, False))
    assert with_it[0] == without[0], "the first weight gets gradients of the other samples alone"
    if task is Fails:
        assert with_it[1] == 0, "it counts as none"
    out = capsys.readouterr().out
    assert out.count("under a key the run goes on, as its end would tell of the batch") == 1


class Reads(LeastSquares):
    """After its first epoch it reads a value, which `torch.vmap` cannot."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(batch)
        return loss if self.current_epoch == 0 or float(loss) < 1e9 else 2 * loss


def test_under_a_key_a_step_that_vmap_cannot_run_any_more_trains_on_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = trained(tmp_path / "plain", LeastSquares(), True)
    assert "under a key the run goes on" not in capsys.readouterr().out
    assert trained(tmp_path / "reads", Reads(), True) == pytest.approx(plain, abs=1e-6), "rounding in single precision"
    assert capsys.readouterr().out.count("under a key the run goes on") == 1


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize(("task", "says"), [(Fails, "row 3"), (Remembers, "'scale'"), (Writes, "'scale'")])
def test_in_a_simulation_the_same_is_refused(task: type[LeastSquares], says: str, tmp_path: Path) -> None:
    with pytest.raises(LitFedError) as error:
        trained(tmp_path / "run", task(), True, key=False)
    assert says in str(error.value)


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("task", [Remembers, Writes])
def test_the_comparison_finds_state_that_is_not_watched(
    task: type[LeastSquares], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateSnapshot, "changed", lambda self, values=True: None)
    with_it, without = (trained(tmp_path / str(there), task(), there) for there in (True, False))
    assert with_it[0] != without[0]


def test_masks_follow_from_the_key_and_not_from_the_servers_seed(tmp_path: Path) -> None:
    def dropped(name: str, key: str | None) -> Tensor:
        (tmp_path / name).mkdir()
        if key is not None:
            (tmp_path / name / "key").touch(0o600)
            (tmp_path / name / "key").write_text(f'{{"key": "{key * 32}"}}\n')
        torch.manual_seed(0)
        network = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1, bias=False))
        task = LeastSquares()
        task.network = network
        privacy = SampleLevel(100.0, 0.0, delta=0.2, key_file=None if key is None else str(tmp_path / name / "key"))
        made = fit(tmp_path / name, task, Odd(True), uniform(), max_rounds=1, privacy=privacy, evaluate_every=0,
                   on_client_failure="skip")  # fmt: skip
        return weights(made)["network.1.weight"]

    one, again, other = dropped("one", "5a"), dropped("again", "5a"), dropped("other", "a5")
    assert torch.equal(one, again)
    assert not torch.equal(one, other), "all samples are in each batch, and there is no noise"


# ---------------------------------------------------------------------- what is seen and undone


def test_every_kind_of_state_is_named_and_undone() -> None:
    class Plain:
        shared: list[int] = []  # noqa: RUF012  # of the class on purpose

        def __init__(self) -> None:
            self.mean, self.drawn, self.table = 0.0, np.random.default_rng(0), np.zeros(3)

    module = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    held: Any = module
    held.own, held.names, held.inner = Plain(), {"a"}, {"deep": [{"x": 1}]}
    held.twice = {"of": held.own}
    changes = {
        "own.mean": lambda: setattr(held.own, "mean", 1.0), "own.drawn": lambda: held.own.drawn.random(),
        "own.table": lambda: held.own.table.fill(1), "Plain.shared": lambda: Plain.shared.append(1),
        "names": lambda: held.names.add("b"),
        "inner.deep[0].x": lambda: held.inner["deep"][0].update(x=2), "0.weight": lambda: module[0].weight.data.add_(1),
        "0.bias": lambda: setattr(module[0].bias, "data", torch.ones(2)), "new": lambda: setattr(held, "new", 1),
        "1.hidden": lambda: setattr(module[1], "hidden", 1),
    }  # fmt: skip
    state = StateSnapshot({"": module})
    for name, change in changes.items():
        assert state.changed() is None, name
        change()
        assert state.changed() == name
        state.restore()
    assert state.changed() is None
    assert Plain.shared == []
    assert not hasattr(module, "new")


def test_a_write_past_a_tensors_version_is_seen_in_its_values_alone() -> None:
    module = nn.Linear(2, 2)
    state = StateSnapshot({"": module})
    module.weight.data.add_(1)
    assert state.changed(values=False) is None
    assert state.changed() == "weight"


def test_the_samples_of_a_batch_in_turn_are_compared_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    still = SampleGradients._still

    def noted(self: SampleGradients, what: str, values: bool, hook: bool = False) -> Any:
        seen.add((self.one_by_one is not None, values, what))
        return still(self, what, values, hook)

    monkeypatch.setattr(SampleGradients, "_still", noted)
    run(tmp_path / "turn", PICTURES["linear"](), task=Reading)
    assert (True, True, "its training_step") in seen
    assert (True, False, "its training_step") not in seen


class Reading(Classifier):
    """`torch.vmap` cannot run it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss if float(loss) < 100 else 2 * loss
