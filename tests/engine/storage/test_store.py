"""What clients keep between rounds: versions, files, leftovers, and nobody's state in another's hands."""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import pytest
import torch
from lightning import Fabric
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_fed.engine.storage.files import write_atomically
from lit_fed.engine.storage.packs import Version, VersionedFiles, write_pack
from lit_fed.engine.storage.store import ClientStore
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import CheckpointError
from tests.support import assert_same

ALONE = Workers(Fabric(accelerator="cpu", devices=1))
CPU = torch.device("cpu")
MODES: list[Literal["memory", "disk"]] = ["memory", "disk"]


def state(value: float) -> dict[str, Tensor]:
    return {"x": torch.full((3,), value), "steps": torch.tensor(int(value))}


def value(store: ClientStore, key: int | str) -> float | None:
    found = store.get(key)
    return None if found is None else float(found["x"][0])


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


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


@pytest.mark.parametrize("count", [100, 2_000, 50_000])
def test_a_checkpoint_that_cannot_be_written_is_told_in_the_systems_words(tmp_path: Path, count: int) -> None:
    """Wherever the disk ends: torch's writer raises errors of its own over the system's."""
    content = {"state_dict": {str(place): torch.zeros(3_000) for place in range(9)}}
    write_atomically(content, tmp_path / "last.ckpt")
    words = r"cannot write .*: \[Errno 27\] File too large; the previous last.ckpt is intact"
    with file_size_limit(count), pytest.raises(CheckpointError, match=words):
        write_atomically(content, tmp_path / "last.ckpt")


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
    expected = b'["4", [["x", "torch.float32", 3], ["steps", "torch.int64"]]]' + struct.pack("<3fq", 2.0, 2.0, 2.0, 2)
    assert store.state_dict() == {"4": (1, crc32(expected))}


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
    assert store.files.directory is not None
    path = store.files.directory / "0.r0.states"
    with safe_open(path, "pt") as content:
        assert json.loads(content.metadata()["state"]) == {"clients": ["0"], "names": ["x"]}
    assert load_file(path)["x"].tolist() == [[1.0, 1.0]]
    blob = path.read_bytes()
    assert len(blob) == 8 + int.from_bytes(blob[:8], "little") + 8  # not the memory behind the view


def test_memory_holds_only_current_states(tmp_path: Path) -> None:
    store = ClientStore("memory")
    store.open(tmp_path)
    for round_idx in range(4):
        store.put_update(ClientUpdate(round_idx, {"w": torch.ones(5)}, 1))
        if round_idx:
            assert store.pop_update(round_idx - 1, CPU, "model", {}) is not None
        store.commit(ALONE, round_idx + 1)
    assert list(store._cache) == ["late-3"]


def test_late_update_comes_back_whole(store: ClientStore) -> None:
    payload = {"weight": torch.ones(2), "a/b": torch.tensor([3], dtype=torch.int32), "h": torch.ones(1).bfloat16()}
    store.put_update(ClientUpdate(7, payload, 12))
    store.commit(ALONE, 1)
    update = store.pop_update(7, CPU, "model", {})
    assert update is not None
    assert (update.client_id, update.weight) == (7, 12.0)
    assert_same(dict(update.payload), payload)
    store.commit(ALONE, 2)
    assert store.pop_update(7, CPU, "model", {}) is None


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
    assert store.files.directory is not None
    best: dict[str, Version] = {}
    for round_idx in range(4):
        store.put(1, state(float(round_idx)))
        store.commit(ALONE, round_idx + 1)
        if round_idx == 1:
            best = store.state_dict()
        store.collect_garbage([store.state_dict(), best], delete=True)
    assert files(store.files.directory) == {"1.r1.states", "1.r3.states"}
    store.collect_garbage([store.state_dict()], delete=True)
    assert files(store.files.directory) == {"1.r3.states"}


def test_other_processes_forget_without_deleting(store: ClientStore) -> None:
    assert store.files.directory is not None
    for round_idx in range(2):
        store.put(1, state(float(round_idx)))
        store.commit(ALONE, round_idx + 1)
    store.collect_garbage([store.state_dict()], delete=False)
    store.collect_garbage([store.state_dict()], delete=True)
    assert files(store.files.directory) == {"1.r0.states", "1.r1.states"}


def test_leftovers_are_ignored_and_collected(tmp_path: Path) -> None:
    killed = ClientStore()
    killed.open(tmp_path)
    killed.put(1, state(1.0))
    killed.put("late-1", state(1.0))
    killed.commit(ALONE, 1)
    index = killed.state_dict()
    killed.put(1, state(2.0))  # round 1 never ends
    killed.put(2, state(2.0))
    killed.files.flush()
    (tmp_path / ".3.r1.states.99999.tmp").write_bytes(b"half a sta")
    (tmp_path / "notes.txt").write_text("somebody's")

    resumed = ClientStore()
    resumed.load_state_dict(index, 1)
    resumed.open(tmp_path)
    resumed.find_leftovers()
    assert value(resumed, 1) == 1.0
    assert resumed.get(2) is None
    resumed.collect_garbage([index], delete=True)
    assert files(tmp_path) == {"1.r0.states", "notes.txt"}


def test_leftover_of_a_round_that_runs_again_is_not_lost(tmp_path: Path) -> None:
    killed = ClientStore()
    killed.open(tmp_path)
    killed.put(2, state(1.0))  # round 0 never ends
    killed.files.flush()
    resumed = ClientStore()
    resumed.open(tmp_path)
    resumed.find_leftovers()
    resumed.put(2, state(5.0))  # the same file again
    resumed.commit(ALONE, 1)
    resumed.collect_garbage([resumed.state_dict()], delete=True)
    assert files(tmp_path) == {"2.r0.states"}
    assert value(resumed, 2) == 5.0


def test_a_repeated_rounds_leftover_is_not_lost_on_the_process_that_deletes_nothing(tmp_path: Path) -> None:
    """Every process collects garbage; only the first one knows what the checkpoints need."""
    killed = ClientStore()
    killed.open(tmp_path)
    killed.put(1, state(1.0))
    killed.put(2, state(2.0))  # round 0 is written, and killed before its checkpoint
    killed.files.flush()
    deleting, other = ClientStore(), ClientStore()
    for one in (deleting, other):
        one.open(tmp_path)
        one.find_leftovers()
    deleting.put(1, state(3.0))
    deleting.put(2, state(4.0))
    written = Given([(dict(deleting._changed), deleting.files.flush(), None)])
    deleting.commit(written, 1)
    other.commit(written, 1)
    deleting.collect_garbage([deleting.state_dict()], delete=True)
    other.collect_garbage([], delete=False)
    for one in (deleting, other):
        assert [value(one, 1), value(one, 2)] == [3.0, 4.0]


class Given(Workers):
    """Gathers what it is given, as from several processes."""

    def __init__(self, parts: list[Any]) -> None:
        super().__init__(ALONE.fabric)
        self.parts = parts

    def gather(self, value: Any) -> list[Any]:
        return self.parts


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
    assert files(tmp_path / "two") == {"1.r1.states"}
    assert value(second, 1) == 1.0


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"PK\x03\x04 not a zip", b"plain text", b"]\x8f"], ids=range(5))
def test_damaged_state_names_client_and_file(store: ClientStore, content: bytes) -> None:
    assert store.files.directory is not None
    store.put(5, state(1.0))
    store.commit(ALONE, 1)
    (store.files.directory / "5.r0.states").write_bytes(content)
    store.load_state_dict(store.state_dict(), 1)
    with pytest.raises(CheckpointError, match=r"the state of client 5 cannot be read from .*5\.r0\.states"):
        store.get(5)


@pytest.fixture
def damaged(store: ClientStore) -> Callable[..., str]:
    """What the store says of a client's state after another content was put into its file."""
    for key in (5, 6, "late-5"):
        store.put(key, {"/x": torch.ones(3), "weight": torch.tensor(2.0)})
    store.commit(ALONE, 1)

    def say(key: str, content: dict[str, Tensor], about: dict[str, str] | None) -> str:
        assert store.files.directory is not None
        path = store.files.directory / "5.r0.states"
        before = path.read_bytes()
        save_file({name: tensor[None] for name, tensor in content.items()}, path, about)
        store.load_state_dict(store.state_dict(), 1)
        with pytest.raises(
            CheckpointError, match=rf"the state of client {key} cannot be read from .*r0\.states: "
        ) as caught:
            store.pop_update(5, CPU, "model", {}) if key == "late-5" else store.get(key)
        path.write_bytes(before)
        assert "\n" not in str(caught.value)
        return str(caught.value).partition(".states: ")[2]

    return say


STATE = {"/x": torch.ones(3), "weight": torch.tensor(2.0)}


@pytest.mark.parametrize("key", ["5", "late-5"])
def test_another_clients_state_is_refused(damaged: Callable[..., str], key: str) -> None:
    about = {"state": json.dumps({"clients": ["6"], "names": list(STATE)})}
    assert damaged(key, STATE, about) == "it differs from what the run wrote"


@pytest.mark.parametrize("key", ["5", "late-5"])
def test_a_state_of_another_shape_or_value_is_refused(damaged: Callable[..., str], key: str) -> None:
    x, weight = STATE["/x"], STATE["weight"]
    others: list[dict[str, Tensor]] = [
        {},
        {"/x": x},  # without its weight
        {"weight": weight},
        {"/x": x[:1], "weight": weight},  # a shape that would be broadcast
        {"/x": x.reshape(1, 3), "weight": weight},
        {"/x": x.double(), "weight": weight},
        {"/x": x + 1e-7, "weight": weight},
        {"/y": x, "weight": weight},
        {"/x": x, "weight": weight, "z": x.clone()},
    ]
    for other in others:
        about = {"state": json.dumps({"clients": [key], "names": list(other)})}
        assert damaged(key, other, about) == "it differs from what the run wrote"
    for nothing in (None, {"state": "{"}, {"state": "[]"}, {"clients": key}):
        assert damaged(key, STATE, nothing).startswith("it is no pack of states")


def test_states_that_changed_clients_are_noticed(store: ClientStore) -> None:
    assert store.files.directory is not None
    for client_id in (5, 6):
        store.put(client_id, state(1.0))  # even where they are the same
    store.commit(ALONE, 1)
    store.load_state_dict(store.state_dict(), 1)
    path = store.files.directory / "5.r0.states"
    before = path.read_bytes()
    swapped = before.replace(rb"[\"5\", \"6\"]", rb"[\"6\", \"5\"]")
    assert swapped != before
    path.write_bytes(swapped)
    assert (value(store, 5), value(store, 6)) == (1.0, 1.0)  # each is found by its name
    write_pack(path, {"5": state(1.0), "6": state(2.0)})
    store.load_state_dict(store.state_dict(), 1)
    assert value(store, 5) == 1.0
    with pytest.raises(CheckpointError, match=r"the state of client 6 .*: it differs from what the run wrote$"):
        store.get(6)


def test_what_comes_back_is_what_was_kept(tmp_path: Path) -> None:
    """Names in their order, types, shapes and values; bytes, and so the checksum, whatever the strides were."""
    kept = {
        "z": torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "": torch.ones(2, dtype=torch.bfloat16),
        "a/b ü": torch.ones(0, 3),
        "step": torch.tensor(True),
        "exact": torch.tensor([0.1, -0.0, float("nan")], dtype=torch.float64),
        "transposed": torch.arange(6).reshape(2, 3).T,
    }
    store = ClientStore()
    store.open(tmp_path)
    store.put(0, kept)
    store.put(1, {})
    store.commit(ALONE, 1)
    found = store.get(0)
    assert found is not None
    assert list(found) == list(kept)
    torch.testing.assert_close(found, kept, rtol=0, atol=0, equal_nan=True)
    assert store.get(1) == {}
    contiguous = {name: tensor.contiguous() for name, tensor in kept.items()}
    assert VersionedFiles(tmp_path).write("0", 1, contiguous)[1] == store.state_dict()["0"][1]


def test_adopting_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    store = ClientStore()
    store.load_state_dict({"1": (0, 0)}, 1)
    store.open(tmp_path / "two")
    with pytest.raises(
        CheckpointError, match=r"the state of client 1 cannot be read from .*one: no pack of round 0 is there"
    ):
        store.adopt(tmp_path / "one")


def test_no_folder() -> None:
    with pytest.raises(CheckpointError, match="lies outside of its run's folder"):
        ClientStore().put(1, state(1.0))


def test_what_no_file_can_hold_is_named(store: ClientStore) -> None:
    store.put(7, {"x": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match=r"the state of client 7 .*complex128"):
        store.commit(ALONE, 1)


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
