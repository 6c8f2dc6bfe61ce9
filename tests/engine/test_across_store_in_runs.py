"""What clients keep between rounds, in a run: nobody's state in another's hands, and no file too many."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed import Client, Model, Pass, Phase, Split
from lit_fed.callbacks import Callback, Checkpoint, RoundRecord
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.engine.loop.run import Run
from lit_fed.engine.storage.packs import VersionedFiles
from lit_fed.engine.storage.store import read_table
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.errors import CheckpointError
from lit_fed.methods import Ditto, FedAvg
from lit_fed.participation import Stragglers, UniformParticipation
from tests.engine.storage.test_store import MODES, files
from tests.support import Threes, Wanderer, Wandering, assert_same, fit, kept, rows, weights


def named_files(folder: Path) -> set[str]:
    """The client states that the checkpoints of a folder name, as the packs that hold them."""
    indices = [read_table(read_checkpoint(path)["clients"]) for path in folder.glob("*.ckpt")]
    packs = VersionedFiles(folder / "clients")
    named = {(name, version[0]) for index in indices for name, version in index.items()}
    assert named <= set(packs.rounds())
    return {packs.path(*one).name for one in named}


class Watching(Wandering):
    """Notes how every client finds itself before it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int, int, Tensor]] = []

    def phases(self, client: Client) -> list[Phase | Pass]:
        if client.stage == "train":
            head = client.model.tensor("network.3.weight").clone()
            self.found.append((client.round_idx, client.id, int(client.state["rounds"]), head))
        return super().phases(client)


class AtHomeLater(FedAvg):
    """The head stays with the clients from a round on."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.since = since

    def split(self, model: Model, round_idx: int) -> Split:
        personal = ("network.3.weight",) if round_idx >= self.since else ()
        return Split(tuple(name for name in model.parameters if name not in personal), personal)


def test_of_the_first_model_is_kept_what_somebody_may_ask_for(tmp_path: Path) -> None:
    def first(method: Any) -> dict[str, Tensor]:
        run = fit(tmp_path / type(method).__name__, Wanderer(), Threes(2), method, max_rounds=2).run
        model = run.federation.loops["model"].model
        assert model.initial.keys() <= set(model.names)
        return {name: tensor for name, tensor in model.initial.items() if name in model.parameters}

    assert first(FedAvg()) == {}
    assert list(first(AtHomeLater(1))) == ["network.3.weight"]
    assert len(first(Ditto())) == len(list(Wanderer().parameters()))


class OneRound(Callback):
    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        run.should_stop = True


def test_what_would_have_stayed_with_clients_later_is_no_obstacle_to_fewer_rounds(tmp_path: Path) -> None:
    fit(tmp_path, Wanderer(), Threes(2), AtHomeLater(4), max_rounds=5, callbacks=[OneRound()])
    resumed = fit(tmp_path, Wanderer(), Threes(2), AtHomeLater(4), max_rounds=3, ckpt_path="last")
    assert resumed.run.start_round == 1


def test_a_new_client_never_inherits_the_previous_ones_state(tmp_path: Path) -> None:
    task, method = Wanderer(lr=0.05), Watching()
    initial = task.network[3].weight.detach().clone()  # type: ignore[index]  # a Sequential
    fit(tmp_path, task, Threes(6), method, max_rounds=8, participation=UniformParticipation(count=2))
    appearances: dict[int, int] = {}
    for _, client_id, rounds, head in method.found:
        assert rounds == appearances.get(client_id, 0)
        # a personal head moves when it trains: it is the initial one on the first appearance and only then
        assert torch.equal(head, initial) == (rounds == 0)
        appearances[client_id] = rounds + 1
    late = [round_idx for round_idx, _, rounds, _ in method.found if rounds == 0]
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
            tmp_path / mode,
            Wanderer(lr=0.05),
            Threes(6),
            Wandering(),
            max_rounds=5,
            participation=participation,
            client_store=mode,
        )
        table = [{n: v for n, v in row.items() if "time" not in n} for row in rows(made.log_dir / "metrics.csv")]
        clients = [row for row in rows(made.log_dir / "clients.csv") if row["metric"] != "time_s"]
        found.append((weights(made), table, clients, made.run.federation.store.state_dict()))
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
        Wandering(),
        max_rounds=6,
        participation=UniformParticipation(count=2),
        callbacks=[checkpoint],
    )
    folder = made.log_dir / "checkpoints"
    assert {path.name for path in folder.glob("*.ckpt")} == {"last.ckpt", "best.ckpt", "round=4.ckpt", "round=5.ckpt"}
    assert files(folder / "clients") == named_files(folder)


def test_without_checkpoints_only_current_states_are_kept(tmp_path: Path) -> None:
    made = fit(tmp_path, Wanderer(lr=0.05), Threes(2), Wandering(), max_rounds=4, enable_checkpointing=False)
    assert files(made.log_dir / "checkpoints" / "clients") == {"0.r3.states"}


class KilledAtWork(Callback):
    """Kills the process, as the system does, once a client of a round has put its state away."""

    def on_client_end(self, run: Any, update: ClientUpdate) -> None:
        if run.next_round == 2:
            os.kill(os.getpid(), signal.SIGKILL)


class KilledBeforeTheCheckpoint(Callback):
    """The same when the states of a round are written, and no checkpoint names them yet."""

    def on_round_end(self, run: Any, record: RoundRecord) -> None:
        if record.round_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("killer", [KilledAtWork, KilledBeforeTheCheckpoint])
def test_killed_in_a_round_and_resumed_equals_uninterrupted(tmp_path: Path, killer: type[Callback]) -> None:
    def run(folder: Path, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return fit(folder, Wanderer(lr=0.05), Threes(3), Wandering(), max_rounds=4, **kwargs)

    child = multiprocessing.get_context("fork").Process(target=run, args=(tmp_path,), kwargs={"callbacks": [killer()]})
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    folder = tmp_path / "lightning_logs" / "version_0" / "checkpoints"
    assert ("0.r2.states" in files(folder / "clients")) == (killer is KilledBeforeTheCheckpoint)
    resumed, whole = run(tmp_path, ckpt_path="last"), run(tmp_path / "whole")
    assert resumed.run.start_round == 2
    assert_same(weights(resumed), weights(whole))
    assert files(folder / "clients") == named_files(folder) >= {"0.r3.states"}
    for client_id in range(3):
        assert_same(kept(resumed, client_id), kept(whole, client_id))


def test_full_disk_during_a_run_leaves_a_checkpoint_to_resume_from(tmp_path: Path) -> None:
    class FullDisk(Callback):
        def on_round_end(self, run: Any, record: Any) -> None:
            if record.round_idx == 1:
                _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))

        def on_exception(self, run: Any, error: BaseException) -> None:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    torch.manual_seed(0)
    with pytest.raises(CheckpointError, match=r"the previous last\.ckpt is intact"):
        fit(tmp_path, Wanderer(lr=0.05), Threes(2), Wandering(), max_rounds=3, callbacks=[FullDisk()])
    resumed = fit(tmp_path, Wanderer(lr=0.05), Threes(2), Wandering(), max_rounds=3, ckpt_path="last")
    assert resumed.run.start_round == 1
    torch.manual_seed(0)
    assert_same(
        weights(resumed), weights(fit(tmp_path / "whole", Wanderer(lr=0.05), Threes(2), Wandering(), max_rounds=3))
    )


def test_resuming_without_checkpointing_leaves_the_old_run_usable(tmp_path: Path) -> None:
    # Nothing would write a newer last.ckpt, while the rounds would supersede the states that the old one names.
    first = fit(tmp_path, Wanderer(lr=0.05), Threes(2), Wandering(), max_rounds=2)
    second = fit(
        tmp_path, Wanderer(lr=0.05), Threes(2), Wandering(), max_rounds=3, ckpt_path="last", enable_checkpointing=False
    )
    assert second.log_dir != first.log_dir
    again = fit(tmp_path, Wanderer(lr=0.05), Threes(2), Wandering(), max_rounds=3, ckpt_path="last")
    assert_same(weights(again), weights(second))
