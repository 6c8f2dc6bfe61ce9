"""Broadcasts in flight: clients train from the version that they started with, and a checkpoint brings it back."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.callbacks import Callback, Checkpoint, RoundRecord
from lit_fed.engine.loop.run import Run
from lit_fed.errors import CheckpointError
from lit_fed.methods import FedAdam, FedAvg, Scaffold
from lit_fed.participation import Asynchronous, FullParticipation, Speeds, UniformParticipation
from tests.support import Points, Threes, Wanderer, Wandering, assert_same, fit, kept, rows, weights


def uneven(**kwargs: Any) -> Asynchronous:
    """Five of eight clients in flight, a step on every second arrival, speeds a factor of e apart."""
    return Asynchronous(**({"concurrency": 5, "buffer": 2, "speeds": Speeds(sigma=1.0)} | kwargs))


def run(folder: Path, rounds: int = 9, algorithm: Any = None, **kwargs: Any) -> Any:
    """Eight clients."""
    settings: dict[str, Any] = {"max_rounds": rounds, "participation": uneven(), "callbacks": [Checkpoint()]}
    data = kwargs.pop("data", None) or Points(num_clients=8)
    return fit(folder, kwargs.pop("module", None), data, algorithm, **(settings | kwargs))


@pytest.mark.parametrize("algorithm", [FedAvg, Scaffold, FedAdam, Wandering])
def test_resumed_anywhere_is_uninterrupted(tmp_path: Path, algorithm: Any) -> None:
    stateful = algorithm is Wandering  # with personal tensors, batch norm and dropout
    extra: dict[str, Any] = {}

    def made() -> dict[str, Any]:
        return {"module": Wanderer(), "data": Points(8, sizes=(2, 3))} if stateful else extra

    torch.manual_seed(0)
    whole = run(tmp_path / "whole", algorithm=algorithm(), **made())
    for stop in (1, 2, 5):
        torch.manual_seed(0)
        run(tmp_path / f"{stop}", stop, algorithm(), **made())
        torch.manual_seed(0)
        resumed = run(tmp_path / f"{stop}", algorithm=algorithm(), ckpt_path="last", **made())
        assert_same(weights(whole), weights(resumed))
        assert resumed.run.federation.versions.keys() == whole.run.federation.versions.keys()
        if stateful:
            for client_id in whole.run.federation.store.clients():
                assert_same(kept(whole, client_id), kept(resumed, client_id))


class Killed(Callback):
    """Raises at the n-th call of a hook, wherever in a round that is."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def on_round_start(self, run: Run, round_idx: int, plan: Any) -> None:
        self._count()

    def on_client_end(self, run: Run, update: Any) -> None:
        self._count()

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        self._count()

    def _count(self) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_twenty_kills_at_seeded_places_leave_the_bits(tmp_path: Path, executor: str) -> None:
    """Each life makes 1 to 9 calls of hooks, of about four a round: it ends before, in, or after a client's work."""
    draw = random.Random(66)

    def live(folder: Path, *more: Any) -> Any:
        participation = uneven(max_staleness=4, dropout_after=0.1)
        return run(
            folder, 30, Scaffold(), callbacks=[*more, Checkpoint()], ckpt_path="last", executor=executor,
            participation=participation,
        )  # fmt: skip

    whole = live(tmp_path / "whole")
    for _ in range(20):
        with pytest.raises(KeyboardInterrupt):
            live(tmp_path / "killed", Killed(draw.randint(1, 9)))
    done = live(tmp_path / "killed")
    assert_same(weights(whole), weights(done))
    assert clocks(whole) == clocks(done)


def clocks(made: Any) -> list[tuple[str, str, str]]:
    table = rows(made.run.log_dir / "metrics.csv")
    return [(row["clock/virtual_s"], row["staleness/mean"], row["staleness/dropped"]) for row in table]


@pytest.mark.parametrize("participation", [FullParticipation, lambda **kw: Asynchronous(8, 8, **kw)])
@pytest.mark.parametrize("module", [None, Wanderer])
def test_equal_speeds_with_a_buffer_of_all_are_fedavg_to_the_bit(
    tmp_path: Path, participation: Any, module: Any
) -> None:
    dropouts = {"dropout_before": 0.2, "dropout_after": 0.2}
    found = []
    for name, made in (("one", FullParticipation(**dropouts)), ("other", participation(**dropouts))):
        torch.manual_seed(0)
        network = module and module()
        data = Points(8, sizes=(2, 3))
        algorithm = Wandering() if module else FedAvg()
        found.append(run(tmp_path / name, 4, algorithm, module=network, data=data, participation=made))
    assert_same(weights(found[0]), weights(found[1]))


class Watcher(Callback):
    """Counts the models alive that are kept for clients in flight, by weak references."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        for one in run.federation.versions.values():
            for tensor in one.payloads["model"].values():
                if not any(other() is tensor for other in self.seen):
                    self.seen.append(weakref.ref(tensor))
        del one, tensor
        gc.collect()
        alive = sum(other() is not None for other in self.seen)
        assert len(run.federation.versions) <= alive <= 6  # the last one trained from may be among them
        self.most = max(self.most, alive)


def test_no_more_models_are_alive_than_clients_are_in_flight(tmp_path: Path) -> None:
    watcher = Watcher()
    run(tmp_path, 40, callbacks=[watcher], participation=uneven(concurrency=6, buffer=1))
    assert 2 <= watcher.most <= 6
    assert len(watcher.seen) > 20


def test_groups_train_one_version_at_a_time(tmp_path: Path) -> None:
    one = run(tmp_path / "one", data=Threes(8))
    groups = run(tmp_path / "groups", data=Threes(8), executor="vectorized")
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(groups)[name], tensor, rtol=1e-6, atol=1e-6)


def test_bytes_and_staleness_of_a_client_are_its_versions(tmp_path: Path) -> None:
    made = run(tmp_path, 9, participation=uneven(max_staleness=2))
    plans = [made.participation.plan(step) for step in range(9)]
    folder = made.run.log_dir
    told = {
        (int(row["round"]), int(row["client_id"])): float(row["value"])
        for row in rows(folder / "clients.csv")
        if row["metric"] == "staleness"
    }
    assert told == {(step, one.client_id): step - one.version for step, plan in enumerate(plans) for one in plan}
    for step, row in enumerate(rows(folder / "metrics.csv")):
        taken = [step - one.version for one in plans[step] if one.fate.value == "on_time"]
        assert float(row["staleness/mean"]) == sum(taken) / 2
        assert float(row["staleness/max"]) == max(taken)
        assert float(row["staleness/dropped"]) == len(plans[step]) - 2
        assert float(row["clock/virtual_s"]) == max(one.ended for one in plans[step])
        assert float(row["comm/downlink_bytes"]) == 8 * len(plans[step])  # two float32 numbers


def test_synchronous_rounds_have_the_same_clock_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("client,seconds\n0,2\n1,5\n")
    for rounds in (1, 3):
        full = FullParticipation(speeds=Speeds(trace=str(path)))
        made = fit(
            tmp_path, None, Points(), None, max_rounds=rounds, participation=full, callbacks=[Checkpoint()],
            ckpt_path="last",
        )  # fmt: skip
    assert [float(row["clock/virtual_s"]) for row in rows(made.run.log_dir / "metrics.csv")] == [5.0, 10.0, 15.0]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (uneven, lambda: UniformParticipation(count=2)),
        (lambda: UniformParticipation(count=2), uneven),
        (uneven, lambda: uneven(speeds=Speeds(sigma=3.0))),
    ],
)
def test_a_run_whose_clients_at_work_are_others_is_refused(tmp_path: Path, first: Any, then: Any) -> None:
    run(tmp_path, 6, participation=first())
    with pytest.raises(CheckpointError, match=r"clients at work were others; keep trainer\.participation as it was"):
        run(tmp_path, 9, participation=then(), ckpt_path="last")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda versions: [], "'versions' are not broadcasts"),
        (lambda versions: {version: {} for version in versions}, "'versions' are not broadcasts"),
        (
            lambda versions: {
                version: one | {"payloads": {"model": {"network.weight": torch.zeros(3)}}}
                for version, one in versions.items()
            },
            "holds a broadcast of round . that does not fit: models.model.network.weight has shape",
        ),
    ],
)
def test_a_damaged_version_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    made = run(tmp_path, 6)
    path = made.run.log_dir / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    torch.save(content | {"versions": change(content["versions"])}, path)
    with pytest.raises(CheckpointError, match=says):
        run(tmp_path, 9, ckpt_path=str(path))
