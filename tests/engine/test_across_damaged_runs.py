"""A run's folder in which something was damaged, replaced or lost: resumed rightly, or refused in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lit_fed.callbacks import Checkpoint
from lit_fed.data import Arrays
from lit_fed.engine.storage.packs import checksum, read_pack, write_pack
from lit_fed.errors import CheckpointError, ClientFailure
from lit_fed.methods import Ditto, FedAvg, FedPer, FedRep, Moon
from lit_fed.participation import UniformParticipation
from tests.support import LeastSquares, Points, Threes, Wanderer, Wandering, assert_same, fit, weights


def federation(folder: Path, rounds: int = 2, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return fit(folder, Wanderer(lr=0.05), Threes(3), Wandering(), max_rounds=rounds, **kwargs)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder: Path, message: str, resume: Callable[[], Any], error: type[Exception] = CheckpointError) -> None:
    """One line, and nothing in the folder has changed."""
    before = contents(folder)
    with pytest.raises(error, match=message) as caught:
        resume()
    assert "\n" not in str(caught.value)
    assert contents(folder) == before


# ---------------------------------------------------------------------- which run is continued


def test_last_names_the_run_that_it_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    federation(tmp_path, 1)
    capsys.readouterr()
    federation(tmp_path, 2, ckpt_path="last")
    assert f"continuing from {tmp_path}/lightning_logs/version_0/checkpoints/last.ckpt with round 1\n" in (
        capsys.readouterr().out
    )
    federation(tmp_path, 3, ckpt_path="best")
    path = tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "best.ckpt"
    folder = tmp_path / "lightning_logs" / "version_1"
    said = capsys.readouterr().out
    assert any(line.startswith(f"continuing from {path} with round ") for line in said.splitlines())
    assert f", in the new folder {folder}\n" in said


def test_a_newer_run_without_a_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    federation(tmp_path, 1)
    logs = tmp_path / "lightning_logs"
    (logs / "version_1").mkdir()
    (logs / "version_²").mkdir()  # a digit to some, and no number
    capsys.readouterr()
    assert federation(tmp_path, 2, ckpt_path="last").log_dir == logs / "version_0"
    said = f"{logs}/version_1 is newer, but without a last.ckpt; using that of {logs}/version_0\n"
    assert said in capsys.readouterr().out
    (logs / "version_2" / "checkpoints").mkdir(parents=True)
    assert federation(tmp_path, 3, ckpt_path="last").log_dir == logs / "version_0"
    said = f"2 runs are newer, but without a last.ckpt; using that of {logs}/version_0\n"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("older", [False, True])
def test_a_run_whose_last_checkpoint_is_lost_is_not_begun_anew(tmp_path: Path, older: bool) -> None:
    if older:
        federation(tmp_path, 1)
    run = federation(tmp_path, 1, callbacks=[Checkpoint(keep_last=1)]).log_dir
    (run / "checkpoints" / "last.ckpt").unlink()
    message = r"version_. has no last\.ckpt, but best\.ckpt, round=0\.ckpt; resume from ckpt_path .*best\.ckpt"
    refused(tmp_path, message, lambda: federation(tmp_path, 2, ckpt_path="last"))
    resumed = federation(tmp_path, 2, ckpt_path=str(run / "checkpoints" / "best.ckpt"))  # as it says
    assert resumed.run.start_round == 1
    assert resumed.log_dir.name == f"version_{int(older) + 1}"


def test_a_checkpoint_outside_of_its_run_lacks_the_clients_states(tmp_path: Path) -> None:
    run = federation(tmp_path, 1).log_dir
    loose = tmp_path / "elsewhere.ckpt"
    shutil.copy(run / "checkpoints" / "last.ckpt", loose)
    refused(
        tmp_path,
        "lies outside of its run's folder, which holds the clients' states",
        lambda: federation(tmp_path, 2, ckpt_path=str(loose)),
    )
    plain = fit(tmp_path / "plain", max_rounds=1).log_dir
    shutil.copy(plain / "checkpoints" / "last.ckpt", loose)
    assert fit(tmp_path / "plain", max_rounds=2, ckpt_path=str(loose)).run.start_round == 1


# ---------------------------------------------------------------------- what lies beside


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 half a checkpoint"])
@pytest.mark.parametrize("name", ["best.ckpt", "round=0.ckpt", "round=final.ckpt", "mine.ckpt", "round=٣.ckpt"])
def test_a_damaged_or_foreign_file_beside_does_not_keep_a_run_from_going_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    def callbacks() -> list[Any]:
        return [Checkpoint(monitor="clients/loss_mean", mode="max", keep_last=2)]  # the first round is the best

    run = federation(tmp_path, 2, callbacks=callbacks()).log_dir
    path = run / "checkpoints" / name
    path.write_bytes(content)
    capsys.readouterr()
    resumed = federation(tmp_path, 4, callbacks=callbacks(), ckpt_path="last")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"left as it is: {path} is ")]
    assert len(said) == (name in ("best.ckpt", "round=0.ckpt"))  # of others it knows nothing
    assert path.read_bytes() == content
    assert_same(weights(resumed), weights(federation(tmp_path / "whole", 4)))


def test_a_foreign_checkpoint_of_any_name_can_be_continued(tmp_path: Path) -> None:
    run = federation(tmp_path, 1).log_dir
    odd = run / "checkpoints" / "round=final.ckpt"
    shutil.copy(run / "checkpoints" / "last.ckpt", odd)
    resumed = federation(tmp_path, 2, ckpt_path=str(odd))
    assert (resumed.run.start_round, resumed.log_dir.name) == (1, "version_1")


# ---------------------------------------------------------------------- other data in the same place


class Stored(Points):
    """Three samples a client, whose arrays may have been replaced."""

    replace: Callable[[Arrays], dict[str, Any]] = staticmethod(lambda arrays: {})

    def load_arrays(self) -> Arrays:
        clients = np.repeat(np.arange(self.num_clients), 3)
        x = np.random.default_rng(0).normal(size=(len(clients), 2)).astype(np.float32)
        y = np.arange(len(clients)) % 5
        named = {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "client_train": clients, "client_test": clients}
        return Arrays(**{**named, **type(self).replace(Arrays(**named)), "source": "stored"})


def swapped(array: Any) -> Any:
    copy = array.copy()
    copy[[0, 1]] = copy[[1, 0]]
    return copy


@pytest.mark.parametrize(
    "replace",
    [
        lambda arrays: {"x_train": arrays.train.x + 0.1},
        lambda arrays: {"x_train": swapped(arrays.train.x)},
        lambda arrays: {"y_train": swapped(arrays.train.y)},
        lambda arrays: {"x_test": -arrays.test.x},
        lambda arrays: {"y_test": swapped(arrays.test.y)},
    ],
)
def test_replaced_data_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: Any) -> None:
    fit(tmp_path, data=Stored(4), max_rounds=1)
    monkeypatch.setattr(Stored, "replace", staticmethod(replace))
    message = r"last\.ckpt comes from a run on other data, whose labels or inputs have changed"
    refused(tmp_path, message, lambda: fit(tmp_path, data=Stored(4), max_rounds=2, ckpt_path="last"))


def test_the_same_data_read_again_are_the_same(tmp_path: Path) -> None:
    fit(tmp_path, data=Stored(4), max_rounds=1)
    assert fit(tmp_path, data=Stored(4), max_rounds=2, ckpt_path="last").run.start_round == 1


# ---------------------------------------------------------------------- clients' states


def pack_of(run: Path) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """The file of the clients' states of a run of one round, and what each client has in it."""
    (path,) = (run / "checkpoints" / "clients").iterdir()
    return path, read_pack(path, ["0", "1", "2"])


def test_a_damaged_state_is_found_before_anything_is_written(tmp_path: Path) -> None:
    path, states = pack_of(federation(tmp_path, 1).log_dir)
    state, name, content = states["0"], next(iter(states["0"])), path.read_bytes()
    write_pack(path, {"0": {}})
    empty = path.read_bytes()
    write_pack(path, {"0": state | {name: state[name].flatten()[:1]}})
    short = path.read_bytes()
    write_pack(path, states | {"0": states["1"]})
    another = path.read_bytes()
    write_pack(path, {client: states[client] for client in ("1", "2")})
    for damaged, why in (
        (empty, r"/0\.r0\.states: it differs from what the run wrote"),
        (short, r"/0\.r0\.states: it differs from what the run wrote"),
        (another, r"/0\.r0\.states: it differs from what the run wrote"),
        (path.read_bytes(), r"/clients: 0\.r0\.states of round 0 holds none"),
        (content[:-10], r"/0\.r0\.states: it is no pack of states: .*"),
        (content[:50], r"/0\.r0\.states: it is no pack of states: .*"),
    ):
        path.write_bytes(damaged)
        message = rf"the state of client 0 cannot be read from .*{why}$"
        refused(tmp_path, message, lambda: federation(tmp_path, 2, ckpt_path="last"))
    path.unlink()
    refused(
        tmp_path,
        r"the state of client 0 cannot be read from .*clients: no pack of round 0 is there",
        lambda: federation(tmp_path, 2, ckpt_path="last"),
    )


def test_a_damaged_state_of_a_later_client_stops_the_run_with_its_id(tmp_path: Path) -> None:
    path, states = pack_of(federation(tmp_path, 1).log_dir)
    write_pack(path, states | {"1": states["2"]})
    with pytest.raises(
        ClientFailure,
        match=r"client 1 failed in round 1: the state of client 1 .* it differs from what the run wrote$",
    ):
        federation(tmp_path, 2, ckpt_path="last")


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
@pytest.mark.parametrize("entry", ["network.3.weight", "state/rounds"])
@pytest.mark.parametrize("client_id", [0, 1])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (torch.Tensor.long, "int64"),
        (torch.Tensor.double, "float64"),
        (torch.Tensor.half, "float16"),
        (lambda tensor: tensor[None, None], "float32"),
        (lambda tensor: torch.zeros(0), r"float32 \(0,\)"),
    ],
)
def test_a_state_of_another_layout_is_refused_though_its_checksum_fits(
    tmp_path: Path, executor: str, entry: str, client_id: int, change: Any, told: str
) -> None:
    def run(rounds: int, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        module = LeastSquares(lr=0.05)
        module.network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Identity(), nn.Linear(4, 1))
        return fit(tmp_path, module, Threes(3), Wandering(), max_rounds=rounds, executor=executor, **kwargs)

    folder = run(1).log_dir
    path, states = pack_of(folder)
    state = states.pop(str(client_id))
    made = {name: tensor.contiguous() for name, tensor in (state | {entry: change(state[entry])}).items()}
    write_pack(path, states)
    write_pack(path.with_name(f"9.{path.name.partition('.')[2]}"), {str(client_id): made})
    last = folder / "checkpoints" / "last.ckpt"
    content = torch.load(last, weights_only=True)
    assert content["clients"][client_id].tolist()[0] == client_id
    content["clients"][client_id, 1] = checksum(str(client_id), made)  # of round 0
    torch.save(content, last)
    name = entry.removeprefix("state/")
    message = rf"the state of client {client_id} belongs to another .* it differs in '{name}': {told}"
    if client_id == 0:
        refused(tmp_path, message, lambda: run(2, ckpt_path="last"))
    else:
        with pytest.raises(ClientFailure, match=message) as caught:
            run(2, ckpt_path="last")
        assert not caught.value.details


# ---------------------------------------------------------------------- another method


class Headed(Wanderer):
    """Says which of its parts is its head."""

    @property
    def head(self) -> Any:
        return self.network[3]  # type: ignore[index]  # a Sequential


def personal(folder: Path, algorithm: Any, rounds: int, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return fit(folder, Headed(lr=0.05), Threes(3), algorithm, max_rounds=rounds, **kwargs)


@pytest.mark.parametrize(
    ("before", "after", "odd"),
    [
        (FedPer, FedAvg, r"network\.3\.bias"),
        (FedPer, Ditto, r"network\.3\.bias"),
        (Ditto, FedPer, r"network\.3\.bias"),
        (Ditto, Moon, r"previous.network\.0\.weight"),
        (Moon, Ditto, r"own.network\.0\.weight"),
    ],
)
def test_a_method_that_the_clients_states_cannot_follow_is_refused_before_anything_is_written(
    tmp_path: Path, before: Any, after: Any, odd: str
) -> None:
    run = personal(tmp_path, before(), 1)
    (run.log_dir / "config.yaml").write_text("algorithm: before\n")

    def resume() -> None:
        torch.manual_seed(0)
        made = run.__class__(**(QUIET | {"default_root_dir": str(tmp_path), "max_rounds": 2}))
        made.describe("algorithm: after\n")
        made.fit(Headed(lr=0.05), Threes(3), after(), "last")

    refused(tmp_path, rf"the state of client 0 belongs to another model or method; it differs in '{odd}'$", resume)


QUIET: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "logger": False}


def test_methods_that_keep_the_same_go_on_from_each_other(tmp_path: Path) -> None:
    personal(tmp_path, FedPer(), 1)
    assert personal(tmp_path, FedRep(), 2, ckpt_path="last").run.start_round == 1


def test_a_state_that_nobody_began_with_is_no_obstacle(tmp_path: Path) -> None:
    """A method may keep what it first has after a client's work."""

    class Counting(Wandering):
        def initial_state(self, client: Any) -> dict[str, Any]:
            return {}

        def objective(self, client: Any, batch: Any) -> Any:
            return FedAvg.objective(self, client, batch)

        def finish(self, client: Any) -> Any:
            client.state.setdefault("rounds", torch.zeros(()))
            return super().finish(client)

    def run(folder: Path, rounds: int, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        participation = UniformParticipation(count=2)
        return fit(folder, Wanderer(), Threes(4), Counting(), max_rounds=rounds, participation=participation, **kwargs)

    run(tmp_path, 2)
    assert_same(weights(run(tmp_path, 4, ckpt_path="last")), weights(run(tmp_path / "whole", 4)))


def test_least_squares_go_on_without_states(tmp_path: Path) -> None:
    fit(tmp_path, LeastSquares(), max_rounds=1)
    assert fit(tmp_path, LeastSquares(), max_rounds=2, ckpt_path="last").run.start_round == 1
