"""What clients keep between rounds: versions, files, leftovers, and nobody's state in another's hands."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from lightning import Fabric
from torch import Tensor

from lit_fed.callbacks import Callback, Checkpoint
from lit_fed.data import Arrays
from lit_fed.errors import CheckpointError
from lit_fed.participation import Stragglers, UniformParticipation
from lit_fed.payload import ClientUpdate
from lit_fed.store import ClientStore, write_atomically
from lit_fed.strategy import Workers
from tests.support import Points, Wanderer, assert_same, fit, rows, weights

ALONE = Workers(Fabric(accelerator="cpu", devices=1))
CPU = torch.device("cpu")
MODES: list[Literal["memory", "disk"]] = ["memory", "disk"]


class Threes(Points):
    """As `Points` with three samples for every client: batch norm cannot train on a single one."""

    def load_arrays(self) -> Arrays:
        clients = np.repeat(np.arange(self.num_clients), 3)
        x = (
            np.eye(2, dtype=np.float32)[clients % 2]
            * np.tile(np.array([1, 2, 3], np.float32), self.num_clients)[:, None]
        )
        y = np.where(clients % 2 == 0, 2, 4)
        return Arrays(x, y, x, y, clients, clients, "threes")


def state(value: float) -> dict[str, Tensor]:
    return {"x": torch.full((3,), value), "steps": torch.tensor(int(value))}


def value(store: ClientStore, key: int | str) -> float | None:
    found = store.get(key)
    return None if found is None else float(found["x"][0])


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def named_files(folder: Path) -> set[str]:
    """The client states that the checkpoints of a folder name."""
    indices = [torch.load(path, weights_only=True)["clients"] for path in folder.glob("*.ckpt")]
    return {f"{name}.r{version}.pt" for index in indices for name, version in index.items()}


@pytest.fixture(params=MODES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ClientStore:
    made = ClientStore(request.param)
    made.open(tmp_path / "clients")
    return made


@contextmanager
def file_size_limit(count: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---------------------------------------------------------------------- versions


def test_a_state_becomes_current_with_commit(store: ClientStore) -> None:
    assert store.get(4) is None
    store.put(4, state(1.0))
    assert store.get(4) is None
    store.commit(ALONE, 1)
    assert_same(store.get(4) or {}, state(1.0))
    store.put(4, state(2.0))
    assert value(store, 4) == 1.0  # still the last round's
    store.commit(ALONE, 2)
    assert value(store, 4) == 2.0
    assert store.state_dict() == {"4": 1}


def test_a_dropped_state_is_gone_with_commit(store: ClientStore) -> None:
    store.put(4, state(1.0))
    store.commit(ALONE, 1)
    store.drop(4)
    assert value(store, 4) == 1.0
    store.commit(ALONE, 2)
    assert store.get(4) is None
    assert store.state_dict() == {}


def test_dropped_and_put_in_one_round_is_the_new_one(store: ClientStore) -> None:
    store.put(4, state(1.0))
    store.commit(ALONE, 1)
    store.drop(4)
    store.put(4, state(2.0))
    store.commit(ALONE, 2)
    assert value(store, 4) == 2.0
    store.collect_garbage([store.state_dict()], delete=True)
    assert value(store, 4) == 2.0


def test_what_is_kept_is_a_copy(store: ClientStore) -> None:
    memory = torch.ones(3)
    store.put(0, {"x": memory[:2]})
    memory.fill_(9.0)
    store.commit(ALONE, 1)
    assert value(store, 0) == 1.0
    assert store.directory is not None
    saved = torch.load(store.directory / "0.r0.pt", weights_only=True)
    assert saved["x"].tolist() == [1.0, 1.0]
    assert saved["x"].untyped_storage().nbytes() == 8  # not the memory behind the view


def test_memory_holds_only_current_states(tmp_path: Path) -> None:
    store = ClientStore("memory")
    store.open(tmp_path)
    for round_idx in range(4):
        store.put_update(ClientUpdate(round_idx, {"w": torch.ones(5)}, 1))
        if round_idx:
            assert store.pop_update(round_idx - 1, CPU) is not None
        store.commit(ALONE, round_idx + 1)
    assert list(store._cache) == ["late-3"]


def test_late_update_comes_back_whole(store: ClientStore) -> None:
    payload = {"weight": torch.ones(2), "a/b": torch.tensor([3], dtype=torch.int32), "h": torch.ones(1).bfloat16()}
    store.put_update(ClientUpdate(7, payload, 12))
    store.commit(ALONE, 1)
    update = store.pop_update(7, CPU)
    assert update is not None
    assert (update.client_id, update.weight) == (7, 12.0)
    assert_same(dict(update.payload), payload)
    store.commit(ALONE, 2)
    assert store.pop_update(7, CPU) is None


def test_back_to_an_index(store: ClientStore) -> None:
    indices = []
    for round_idx in range(3):
        store.put(1, state(float(round_idx)))
        store.commit(ALONE, round_idx + 1)
        indices.append(store.state_dict())
    store.load_state_dict(indices[0], 1)
    assert value(store, 1) == 0.0
    store.put(1, state(7.0))  # round 1 again, over the file of before
    store.commit(ALONE, 2)
    assert value(store, 1) == 7.0


# ---------------------------------------------------------------------- files


def test_garbage_keeps_what_kept_checkpoints_name(store: ClientStore) -> None:
    assert store.directory is not None
    best: dict[str, int] = {}
    for round_idx in range(4):
        store.put(1, state(float(round_idx)))
        store.commit(ALONE, round_idx + 1)
        if round_idx == 1:
            best = store.state_dict()
        store.collect_garbage([store.state_dict(), best], delete=True)
    assert files(store.directory) == {"1.r1.pt", "1.r3.pt"}
    store.collect_garbage([store.state_dict()], delete=True)
    assert files(store.directory) == {"1.r3.pt"}


def test_other_processes_forget_without_deleting(store: ClientStore) -> None:
    assert store.directory is not None
    for round_idx in range(2):
        store.put(1, state(float(round_idx)))
        store.commit(ALONE, round_idx + 1)
    store.collect_garbage([store.state_dict()], delete=False)
    store.collect_garbage([store.state_dict()], delete=True)
    assert files(store.directory) == {"1.r0.pt", "1.r1.pt"}


def test_leftovers_are_ignored_and_collected(tmp_path: Path) -> None:
    killed = ClientStore()
    killed.open(tmp_path)
    killed.put(1, state(1.0))
    killed.put("late-1", state(1.0))
    killed.commit(ALONE, 1)
    index = killed.state_dict()
    killed.put(1, state(2.0))  # round 1 never ends
    killed.put(2, state(2.0))
    (tmp_path / ".3.r1.pt.99999.tmp").write_bytes(b"half a sta")
    (tmp_path / "notes.txt").write_text("somebody's")

    resumed = ClientStore()
    resumed.load_state_dict(index, 1)
    resumed.open(tmp_path)
    resumed.find_leftovers()
    assert value(resumed, 1) == 1.0
    assert resumed.get(2) is None
    resumed.collect_garbage([index], delete=True)
    assert files(tmp_path) == {"1.r0.pt", "late-1.r0.pt", "notes.txt"}


def test_leftover_of_a_round_that_runs_again_is_not_lost(tmp_path: Path) -> None:
    killed = ClientStore()
    killed.open(tmp_path)
    killed.put(2, state(1.0))  # round 0 never ends
    resumed = ClientStore()
    resumed.open(tmp_path)
    resumed.find_leftovers()
    resumed.put(2, state(5.0))  # the same file again
    resumed.commit(ALONE, 1)
    resumed.collect_garbage([resumed.state_dict()], delete=True)
    assert files(tmp_path) == {"2.r0.pt"}
    assert value(resumed, 2) == 5.0


def test_adopting_another_runs_states(tmp_path: Path) -> None:
    first = ClientStore()
    first.open(tmp_path / "one")
    for round_idx in range(2):
        first.put(1, state(float(round_idx)))
        first.put("late-3", state(4.0))
        first.commit(ALONE, round_idx + 1)
    second = ClientStore("disk")
    second.load_state_dict(first.state_dict(), 2)
    second.open(tmp_path / "two")
    second.adopt(tmp_path / "one")
    assert files(tmp_path / "two") == {"1.r1.pt", "late-3.r1.pt"}
    assert value(second, 1) == 1.0


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"PK\x03\x04 not a zip", b"plain text", b"]\x8f"], ids=range(5))
def test_damaged_state_names_client_and_file(store: ClientStore, content: bytes) -> None:
    assert store.directory is not None
    store.put(5, state(1.0))
    store.commit(ALONE, 1)
    (store.directory / "5.r0.pt").write_bytes(content)
    store.load_state_dict(store.state_dict(), 1)
    with pytest.raises(CheckpointError, match=r"the state of client 5 cannot be read from .*5\.r0\.pt"):
        store.get(5)


def test_no_folder() -> None:
    with pytest.raises(CheckpointError, match="the run has no folder"):
        ClientStore().put(1, state(1.0))


def test_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write_atomically({"x": torch.zeros(10)}, path)
    before = path.read_bytes()
    with (
        file_size_limit(50_000),
        pytest.raises(
            CheckpointError, match=r"cannot write .*last\.ckpt: .*the previous last\.ckpt is intact"
        ) as caught,
    ):
        write_atomically({"x": torch.zeros(100_000)}, path)
    assert "File too large" in str(caught.value)
    assert path.read_bytes() == before
    assert files(tmp_path) == {"last.ckpt"}
    write_atomically({"x": torch.ones(100_000)}, path)
    assert torch.load(path, weights_only=True)["x"].sum() == 100_000


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*: .*(Not a directory|File exists)"):
        write_atomically({}, tmp_path / "file" / "last.ckpt")


# ---------------------------------------------------------------------- in a run


class Watching(Wanderer):
    """Notes how every client finds itself before it trains."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.found: list[tuple[int, int, int, Tensor]] = []

    def on_train_start(self) -> None:
        assert self.ctx is not None
        if self.ctx.stage == "train":
            head = self.tensor("network.3.weight").clone()
            self.found.append((self.ctx.round_idx, self.ctx.client_id, int(self.rounds), head))


def test_a_new_client_never_inherits_the_previous_ones_state(tmp_path: Path) -> None:
    module = Watching(lr=0.05)
    initial = module.network[3].weight.detach().clone()
    fit(tmp_path, module, Threes(6), max_rounds=8, participation=UniformParticipation(count=2))
    appearances: dict[int, int] = {}
    for _, client_id, rounds, head in module.found:
        assert rounds == appearances.get(client_id, 0)
        # a personal head moves when it trains: it is the initial one on the first appearance and only then
        assert torch.equal(head, initial) == (rounds == 0)
        appearances[client_id] = rounds + 1
    late = [round_idx for round_idx, _, rounds, _ in module.found if rounds == 0]
    assert max(late) > 0  # somebody first appeared after others had trained
    assert max(appearances.values()) > 1


def test_memory_and_disk_give_the_same_bits(tmp_path: Path) -> None:
    found = []
    for mode in MODES:
        torch.manual_seed(0)
        participation = UniformParticipation(
            count=3, stragglers=Stragglers(deadline=0.03, speed_sigma=1.0, late="next_round")
        )
        made = fit(
            tmp_path / mode, Wanderer(lr=0.05), Threes(6), max_rounds=5, participation=participation, client_store=mode
        )
        assert made.log_dir is not None
        table = [{n: v for n, v in row.items() if "time" not in n} for row in rows(made.log_dir / "metrics.csv")]
        clients = [row for row in rows(made.log_dir / "clients.csv") if row["metric"] != "time_s"]
        assert made.federation is not None
        found.append((weights(made), table, clients, made.federation.store.state_dict()))
    (one, one_table, one_clients, one_index), (two, two_table, two_clients, two_index) = found
    assert_same(one, two)
    assert (one_table, one_clients, one_index) == (two_table, two_clients, two_index)
    assert any(int(float(row["participation/count"])) != 3 for row in one_table)  # updates were late


def test_a_run_keeps_exactly_the_files_its_checkpoints_name(tmp_path: Path) -> None:
    checkpoint = Checkpoint(monitor="clients/loss_mean", mode="max", keep_last=2)
    made = fit(
        tmp_path,
        Wanderer(lr=0.05),
        Threes(4),
        max_rounds=6,
        participation=UniformParticipation(count=2),
        callbacks=[checkpoint],
    )
    assert made.log_dir is not None
    folder = made.log_dir / "checkpoints"
    assert {path.name for path in folder.glob("*.ckpt")} == {"last.ckpt", "best.ckpt", "round=4.ckpt", "round=5.ckpt"}
    assert files(folder / "clients") == named_files(folder)


def test_without_checkpoints_only_current_states_are_kept(tmp_path: Path) -> None:
    made = fit(tmp_path, Wanderer(lr=0.05), Threes(2), max_rounds=4, enable_checkpointing=False)
    assert made.log_dir is not None
    assert files(made.log_dir / "checkpoints" / "clients") == {"0.r3.pt", "1.r3.pt"}


class Killer(Callback):
    """Kills the process, as the system does, once a client of a round has put its state away."""

    def on_client_end(self, trainer: Any, update: ClientUpdate) -> None:
        if trainer.next_round == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def test_killed_in_a_round_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    def run(folder: Path, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return fit(folder, Wanderer(lr=0.05), Threes(3), max_rounds=4, **kwargs)

    child = multiprocessing.get_context("fork").Process(target=run, args=(tmp_path,), kwargs={"callbacks": [Killer()]})
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    folder = tmp_path / "lightning_logs" / "version_0" / "checkpoints"
    assert any(name.endswith(".r2.pt") for name in files(folder / "clients"))  # of the round that did not end
    resumed, whole = run(tmp_path, ckpt_path="last"), run(tmp_path / "whole")
    assert resumed.start_round == 2
    assert_same(weights(resumed), weights(whole))
    assert files(folder / "clients") == named_files(folder) >= {"0.r3.pt", "1.r3.pt", "2.r3.pt"}
    for client_id in range(3):
        assert_same(
            torch.load(folder / "clients" / f"{client_id}.r3.pt", weights_only=True),
            torch.load(whole.log_dir / "checkpoints" / "clients" / f"{client_id}.r3.pt", weights_only=True),
        )


def test_full_disk_during_a_run_leaves_a_checkpoint_to_resume_from(tmp_path: Path) -> None:
    class FullDisk(Callback):
        def on_round_end(self, trainer: Any, record: Any) -> None:
            if record.round_idx == 1:
                _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))

        def on_exception(self, trainer: Any, error: BaseException) -> None:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    torch.manual_seed(0)
    with pytest.raises(CheckpointError, match=r"the previous last\.ckpt is intact"):
        fit(tmp_path, Wanderer(lr=0.05), Threes(2), max_rounds=3, callbacks=[FullDisk()])
    resumed = fit(tmp_path, Wanderer(lr=0.05), Threes(2), max_rounds=3, ckpt_path="last")
    assert resumed.start_round == 1
    torch.manual_seed(0)
    assert_same(weights(resumed), weights(fit(tmp_path / "whole", Wanderer(lr=0.05), Threes(2), max_rounds=3)))


def test_resuming_without_checkpointing_leaves_the_old_run_usable(tmp_path: Path) -> None:
    # Nothing would write a newer last.ckpt, while the rounds would supersede the states that the old one names.
    first = fit(tmp_path, Wanderer(lr=0.05), Threes(2), max_rounds=2)
    second = fit(tmp_path, Wanderer(lr=0.05), Threes(2), max_rounds=3, ckpt_path="last", enable_checkpointing=False)
    assert second.log_dir != first.log_dir
    again = fit(tmp_path, Wanderer(lr=0.05), Threes(2), max_rounds=3, ckpt_path="last")
    assert_same(weights(again), weights(second))
