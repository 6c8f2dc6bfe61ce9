"""A simulation's jobs: what is done is kept until the whole is."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lit_fed.errors import CheckpointError
from lit_fed.studies.papers.fedfrozen import Figure2, Figure3, Proposition1
from lit_fed.studies.papers.fedfrozen.linear_attention import TeacherTask
from lit_fed.studies.papers.uwa import Proposition42
from lit_fed.studies.simulations.jobs import Jobs
from lit_fed.studies.simulations.simulation import Simulation
from tests.support import flip_tensor_bit


class Part(NamedTuple):
    curve: dict[int, list[float]]
    tensor: Tensor


class Whole(NamedTuple):
    parts: list[Part]


class Doing:
    """Notes what it did, and fails at a job that it is told."""

    def __init__(self, failing: int | None = None) -> None:
        self.done: list[int] = []
        self.failing = failing

    def work(self, job: int) -> Whole:
        if job == self.failing:
            raise KeyboardInterrupt
        self.done.append(job)
        return Whole([Part({job: [0.5, float("inf")]}, torch.arange(job))])


def same(one: Whole, other: Whole) -> bool:
    pairs = zip(one.parts, other.parts, strict=True)
    return all(a.curve == b.curve and a.tensor.equal(b.tensor) for a, b in pairs)


def test_what_was_stopped_goes_on(tmp_path: Path) -> None:
    jobs, whole = Jobs(folder=tmp_path), Doing()
    expected = Jobs().run(whole.work, [1, 2, 3])
    stopped, rest = Doing(failing=2), Doing()
    with pytest.raises(KeyboardInterrupt):
        jobs.run(stopped.work, [1, 2, 3], (Whole, Part))
    found = jobs.run(rest.work, [1, 2, 3], (Whole, Part))
    assert (stopped.done, rest.done) == ([1], [2, 3])
    assert all(map(same, found, expected))
    assert isinstance(found[0], Whole)
    jobs.forget()
    assert not list(tmp_path.iterdir())


def test_another_commit_begins_anew(tmp_path: Path) -> None:
    first, second = Doing(), Doing()
    Jobs(folder=tmp_path, made_with="one").run(first.work, [1], (Whole, Part))
    Jobs(folder=tmp_path, made_with="two").run(second.work, [1], (Whole, Part))
    assert second.done == [1]


def test_a_flipped_bit_in_a_kept_outcome_is_refused_by_the_file(tmp_path: Path) -> None:
    jobs = Jobs(folder=tmp_path)
    jobs.run(Doing().work, [7], (Whole, Part))
    (kept,) = (tmp_path / "jobs").iterdir()
    flip_tensor_bit(kept, torch.arange(7))
    with pytest.raises(CheckpointError, match=rf"^{kept} is damaged; remove it, and its job runs again$"):
        jobs.run(Doing().work, [7], (Whole, Part))
    kept.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is damaged"):
        jobs.run(Doing().work, [7], (Whole, Part))
    kept.unlink()
    assert same(jobs.run(Doing().work, [7], (Whole, Part))[0], Doing().work(7))


def _square(job: int) -> int:
    return job * job


@pytest.mark.long
def test_side_by_side_in_their_order(tmp_path: Path) -> None:
    run = partial(Jobs(processes=2, folder=tmp_path).run, _square, [3, 1, 2])
    assert run() == run() == [9, 1, 4]
    assert len(list((tmp_path / "jobs").iterdir())) == 3


SMALL = TeacherTask(num_clients=2, dim=4, key_dim=2, value_dim=2, tokens=3, examples=4)


@pytest.mark.parametrize(
    "simulation",
    [
        Figure2(task=SMALL, seeds=2, rounds=4, steps=(1, 2), rhos=(0.0, 1.0)),
        Figure3(task=SMALL, seeds=2, rounds=4, rhos=(0.0, 1.0), ridges=(0.0, 1.0)),
        Proposition1(task=SMALL, seeds=2, rounds=4, every=2, rhos=(1.0,)),
        Proposition42(seeds=2, steps=20),
    ],
    ids=lambda simulation: type(simulation).__name__,
)
def test_every_simulation_goes_on_with_what_is_kept(
    tmp_path: Path, simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs(folder=tmp_path)
    expected = simulation.points(jobs)

    def again(*_: object) -> None:
        raise AssertionError("a job that was kept ran again")

    monkeypatch.setattr(torch, "save", again)
    assert simulation.points(jobs) == expected
    assert expected == simulation.points()
