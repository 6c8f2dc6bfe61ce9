"""States of many clients in few files: what is read is what was written, whoever wrote it."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_fed.engine.storage import packs
from lit_fed.engine.storage.packs import Version, VersionedFiles, checksum, clients_of, read_pack, write_pack
from lit_fed.engine.storage.store import ClientStore
from lit_fed.errors import CheckpointError
from lit_fed.tensors import is_aligned
from tests.engine.storage.test_store import ALONE, file_size_limit, files, state, value


def opened(folder: Path, index: dict[str, Version] | None = None, round_idx: int = 0) -> ClientStore:
    """A store of packs, as a process finds the folder."""
    store = ClientStore()
    store.load_state_dict(index or {}, round_idx)
    store.open(folder)
    return store


def of_five(folder: Path) -> ClientStore:
    """One pack of five clients."""
    store = opened(folder)
    for client_id in range(5):
        store.put(client_id, state(float(client_id)))
    store.commit(ALONE, 1)
    return store


def test_states_that_are_read_together_lie_in_memory_as_those_that_are_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "0.r0.states"
    write_pack(
        path, {str(client): {"w": torch.full((13,), float(client)), "b": torch.tensor(1)} for client in range(5)}
    )
    for clients in (["3"], ["1", "4", "3"]):
        read = read_pack(path, clients)
        assert list(read) == clients
        assert all(is_aligned(tensor) for held in read.values() for tensor in held.values())
        assert all(torch.equal(held["w"], torch.full((13,), float(client))) for client, held in read.items())


def in_two(work: Callable[[int, Any], None]) -> None:
    """Do something as two processes would, which gather what each has."""
    barrier, handed, errors = threading.Barrier(2, timeout=20), [None, None], list[BaseException]()

    class Both:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def gather(self, part: Any) -> list[Any]:
            handed[self.rank] = part
            barrier.wait()
            parts = list(handed)
            barrier.wait()
            return parts

    def run(rank: int) -> None:
        try:
            work(rank, Both(rank))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_a_round_is_an_ordinary_file_of_stacked_states_that_says_whose_they_are(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for client_id in (4, 2):
        store.put(client_id, state(float(client_id)))
    assert files(tmp_path) == set()
    store.commit(ALONE, 1)
    assert files(tmp_path) == {"4.r0.states"}
    with safe_open(tmp_path / "4.r0.states", "pt") as pack:
        assert json.loads(pack.metadata()["state"]) == {"clients": ["4", "2"], "names": ["x", "steps"]}
    columns = load_file(tmp_path / "4.r0.states")
    assert (columns["x"].tolist(), columns["steps"].tolist()) == ([[4.0] * 3, [2.0] * 3], [4, 2])
    assert (value(store, 4), value(store, 2), value(store, 3)) == (4.0, 2.0, None)


def work_in(
    stores: list[ClientStore], round_idx: int, writes: set[int], drops: set[int], rank: int, workers: Any
) -> None:
    """A process's part of a round: clients move between processes, and only one drops each."""
    for client_id in writes:
        if (client_id + round_idx) % 2 == rank:
            stores[rank].put(client_id, state(100.0 * round_idx + client_id))
    for client_id in drops:
        if client_id % 2 == rank:
            stores[rank].drop(client_id)
    stores[rank].commit(workers, round_idx + 1)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)), st.booleans(), st.booleans()), max_size=12
    ),
    st.sampled_from([1, 400, 2**23]),
)
def test_any_rounds_by_one_process_or_two_are_as_a_dictionary(rounds: Any, held_back: int) -> None:
    """By round: who writes, who is dropped, whether a checkpoint is kept for good, whether all are killed before."""
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs, "_MOST_BYTES", held_back)
        folder = Path(name)
        stores = [opened(folder), opened(folder)]
        expected: dict[str, float] = {}
        kept: list[tuple[dict[str, Version], dict[str, float]]] = []
        for round_idx, (writes, drops, keeps, killed) in enumerate(rounds):
            if killed:
                index = stores[0].state_dict()
                for store in stores:  # half a round that nobody hears of
                    store.put(min(writes, default=0), state(-1.0))
                    store.files.flush()
                stores = [opened(folder, index, round_idx) for _ in stores]
                for store in stores:
                    store.find_leftovers()
            in_two(partial(work_in, stores, round_idx, writes, drops - writes))
            expected = {key: number for key, number in expected.items() if int(key) not in drops}
            expected |= {str(client_id): 100.0 * round_idx + client_id for client_id in writes}
            if keeps:
                kept.append((stores[0].state_dict(), expected))
            last = (stores[0].state_dict(), expected)
            assert stores[1].state_dict() == last[0]
            for rank in (1, 0):
                stores[rank].collect_garbage([index for index, _ in [*kept, last]], delete=rank == 0)
            found = [*stores, opened(folder, last[0], round_idx + 1)]
            assert all({key: value(store, key) for key in last[0]} == expected for store in found)
            for store in found:  # read together, once it has read or written one, and beside keys that it has not
                with store.reading([*last[0], "9"]):
                    assert {key: value(store, key) for key in last[0]} == expected
                assert value(store, "9") is None
            needed = {(key, version) for index, _ in [*kept, last] for key, version in index.items()}
            write_pack(folder.parent / f"{folder.name}.one", {"0": state(1.0)})
            each = (folder.parent / f"{folder.name}.one").stat().st_size
            (folder.parent / f"{folder.name}.one").unlink()
            assert sum(path.stat().st_size for path in folder.iterdir()) <= 2 * len(needed) * each
        for index, before in kept:
            assert {key: value(opened(folder, index), key) for key in index} == before


def test_a_large_state_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "_MOST_BYTES", 2_000)
    store = opened(tmp_path)
    for client_id, count in ((0, 10), (1, 600), (2, 10), (3, 600)):
        store.put(client_id, {"x": torch.zeros(count)})
    assert files(tmp_path) == {f"{client_id}.r0.states" for client_id in range(4)}  # a layout each
    store.commit(ALONE, 1)
    assert [len((store.get(client_id) or {})["x"]) for client_id in range(4)] == [10, 600, 10, 600]


def test_a_pack_that_is_mostly_superseded_is_written_anew(tmp_path: Path) -> None:
    store = of_five(tmp_path)
    other = opened(tmp_path, store.state_dict(), 1)
    assert value(other, 4) == 4.0  # knows where it lies
    path = tmp_path / "0.r0.states"
    for round_idx, clients in ((1, 5), (2, 5), (3, 2), (4, 2), (5, 0)):
        store.put(round_idx - 1, state(9.0))
        store.commit(ALONE, round_idx + 1)
        store.collect_garbage([store.state_dict()], delete=True)
        assert (len(clients_of(path)) if path.exists() else 0) == clients
        if clients:
            assert value(store, 4) == 4.0
    assert files(tmp_path) == {f"{client_id}.r{client_id + 1}.states" for client_id in range(5)}


def test_deleting_one_state_leaves_the_others_of_its_pack(tmp_path: Path) -> None:
    store = of_five(tmp_path)
    store.files.forget([("2", 0)], delete=True)
    assert [value(store, client_id) for client_id in (0, 1, 3, 4)] == [0.0, 1.0, 3.0, 4.0]
    with pytest.raises(CheckpointError, match=r"the state of client 2 .*: 0\.r0\.states of round 0 holds none$"):
        store.get(2)


def test_who_knew_another_place_in_a_pack_looks_again(tmp_path: Path) -> None:
    store = of_five(tmp_path)
    other = opened(tmp_path, store.state_dict(), 1)
    assert value(other, 0) == 0.0
    for client_id in range(3):
        store.put(client_id, state(9.0))
    store.commit(ALONE, 2)
    store.collect_garbage([store.state_dict()], delete=True)  # moves 3 and 4 to the beginning
    assert (value(other, 3), value(other, 4)) == (3.0, 4.0)


def test_a_pack_of_a_killed_round_that_runs_again_with_other_shares(tmp_path: Path) -> None:
    killed = opened(tmp_path)
    for client_id in (1, 2, 3):
        killed.put(client_id, state(-1.0))
    killed.files.flush()
    first, second = opened(tmp_path), opened(tmp_path)
    for store in (first, second):
        store.find_leftovers()

    def again(rank: int, workers: Any) -> None:
        (first, second)[rank].put(2 if rank else 1, state(5.0))
        (first, second)[rank].commit(workers, 1)

    in_two(again)
    index = first.state_dict()
    second.collect_garbage([index], delete=False)
    first.collect_garbage([index], delete=True)
    for store in (first, second, opened(tmp_path, index, 1)):
        assert (value(store, 1), value(store, 2), value(store, 3)) == (5.0, 5.0, None)
    assert files(tmp_path) == {"1.r0.states", "2.r0.states"}


def test_adopting_takes_the_current_states_only(tmp_path: Path) -> None:
    one = opened(tmp_path / "one")
    for round_idx in range(2):
        for client_id in range(3 - round_idx):
            one.put(client_id, state(10.0 * round_idx + client_id))
        one.commit(ALONE, round_idx + 1)
    two = ClientStore()
    two.load_state_dict(one.state_dict(), 2)
    two.open(tmp_path / "two")
    two.adopt(tmp_path / "one")
    assert files(tmp_path / "two") == {"0.r1.states", "2.r0.states"}
    assert [value(two, client_id) for client_id in range(3)] == [10.0, 11.0, 2.0]
    with pytest.raises(
        CheckpointError, match=r"the state of client 0 cannot be read from .*nowhere: no pack of round 1 is there"
    ):
        two.adopt(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"plain text", b"]\x8f" * 40], ids=range(4))
@pytest.mark.parametrize("knows", [True, False])
def test_a_damaged_pack_names_client_and_file(tmp_path: Path, content: bytes, knows: bool) -> None:
    store = opened(tmp_path)
    for client_id in (5, 6):
        store.put(client_id, state(1.0))
    store.commit(ALONE, 1)
    (tmp_path / "5.r0.states").write_bytes(content)
    reader = store if knows else opened(tmp_path, store.state_dict(), 1)
    for client_id in (5, 6):
        with pytest.raises(
            CheckpointError, match=rf"the state of client {client_id} cannot be read from .*r0\.states: "
        ):
            reader.get(client_id)


def test_a_pack_that_was_cut_off_is_told_for_every_client_of_it(tmp_path: Path) -> None:
    store = of_five(tmp_path)
    path = tmp_path / "0.r0.states"
    path.write_bytes(path.read_bytes()[:-10])
    for reader in (store, opened(tmp_path, store.state_dict(), 1)):
        for client_id in range(5):
            message = rf"the state of client {client_id} .*/0\.r0\.states: it is no pack of states: "
            with pytest.raises(CheckpointError, match=message):
                reader.get(client_id)


def test_a_full_disk_is_told_by_every_process(tmp_path: Path) -> None:
    stores, told = [opened(tmp_path), opened(tmp_path)], []

    def work(rank: int, workers: Any) -> None:
        stores[rank].put(rank, {"x": torch.zeros(2_000 if rank else 10)})
        try:
            stores[rank].commit(workers, 1)
        except CheckpointError as error:
            told.append(str(error))

    with file_size_limit(5_000):
        in_two(work)
    assert len(told) == 2
    assert told[0] == told[1]
    assert "cannot write" in told[0]
    assert "1.r0.states: [Errno 27] File too large" in told[0]


TYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.int16,
    torch.uint8, torch.bool,
)  # fmt: skip
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
LAYOUTS = st.dictionaries(NAMES, st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=4)
OWNERS = st.one_of(st.integers(0, 10**6).map(str), st.integers(0, 99).map("late-{}".format), NAMES)


def drawn(layout: dict[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 100, shape, generator=generator).to(dtype) for name, (dtype, shape) in layout.items()
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(
        (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape) and tensor.equal(other[name])
        for name, tensor in one.items()
    )


@settings(deadline=None)
@given(LAYOUTS, st.lists(OWNERS, min_size=1, max_size=5, unique=True), st.data())
def test_any_states_come_back_as_they_were(layout: Any, owners: list[str], data: Any) -> None:
    """Several at once or each alone, in any order; names in their order, and the checksum of what was written."""
    states = {owner: drawn(layout, seed) for seed, owner in enumerate(owners)}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "0.r0.states"
        write_pack(path, states)
        asked = data.draw(st.lists(st.sampled_from([*owners, "nobody"]), unique=True))
        found = read_pack(path, asked)
        assert clients_of(path) == owners
        assert list(found) == [owner for owner in asked if owner != "nobody"]
        for owner, state in found.items():
            assert same(state, states[owner])
            assert same(read_pack(path, [owner])[owner], state)
            assert checksum(owner, state) == checksum(owner, states[owner]) != checksum(owner + "1", state)


def test_what_is_read_may_be_changed_without_changing_what_is_read_next(tmp_path: Path) -> None:
    store = of_five(tmp_path)
    for _ in range(3):
        found = (store.get(3) or {})["x"]
        assert found.tolist() == [3.0] * 3
        found.add_(1.0)


def test_what_is_undone_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "_MOST_BYTES", 100)  # two packs of three states, and a rest
    store = of_five(tmp_path)
    kept = files(tmp_path)
    for client_id in range(8):
        store.put(client_id, state(9.0))
    assert files(tmp_path) > kept
    store.undo(range(8))
    assert files(tmp_path) == kept
    store.put(3, state(7.0))
    store.commit(ALONE, 2)
    assert [value(store, client_id) for client_id in (0, 3, 7)] == [0.0, 7.0, None]


def test_only_the_clients_that_are_undone_lose_their_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of the present round may have been delivered before another one fails; so may a late update."""
    monkeypatch.setattr(packs, "_MOST_BYTES", 100)  # packs of three states: 0 to 2, 3 to 5, and 6 and 7 in memory
    store = of_five(tmp_path)
    for client_id in range(8):
        store.put(client_id, state(9.0))
    store.undo([4, 5, 7])
    store.put(5, state(7.0))
    store.commit(ALONE, 2)
    found = [value(store, client_id) for client_id in range(8)]
    assert found == [9.0, 9.0, 9.0, 9.0, 4.0, 7.0, 9.0, None]


def test_a_client_that_is_written_twice_in_a_round_has_its_last_state(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in (1.0, 2.0):
        store.put(3, state(number))
    store.put(4, state(3.0))
    store.commit(ALONE, 1)
    assert (value(store, 3), value(store, 4)) == (2.0, 3.0)


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/b", ""])
def test_a_client_with_a_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    made = VersionedFiles(tmp_path / "clients")
    for act in (lambda: made.write(name, 0, state(1.0)), lambda: made.read(name, (0, 0))):
        with pytest.raises(CheckpointError, match="would place its state outside"):
            act()
    assert list(tmp_path.rglob("*")) == []


# ---------------------------------------------------------------------- packs that somebody has made up


def header(begin: Any, end: Any) -> bytes:
    """The header of a pack that announces values at these places."""
    about = {"state": json.dumps({"clients": ["3"], "names": ["w"]})}
    head = json.dumps({"__metadata__": about, "w": {"dtype": "F32", "shape": [1, 1], "data_offsets": [begin, end]}})
    return struct.pack("<Q", len(head)) + head.encode()


@pytest.mark.parametrize(
    "made_up",
    [
        header(0, -10), header(-4, 0), header(0, -(2**40)), header(8, 4), header(0, 2**62), header(0, 2**70),
        header(0, 4.0), header("0", "4"), header(None, None), header(True, 4), struct.pack("<Q", 2**63), b"\xff" * 8,
        struct.pack("<Q", 0), struct.pack("<Q", 6) + b"[1, 2]", struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 20_000) + b"[" * 20_000, b"\1", header(0, 4),
    ],
    ids=range(18),
)  # fmt: skip
def test_a_pack_that_leads_out_of_itself_is_refused_by_its_name(tmp_path: Path, made_up: bytes) -> None:
    store = of_five(tmp_path)
    path = tmp_path / "0.r0.states"
    path.write_bytes(made_up)
    reader = opened(tmp_path, store.state_dict(), 1)
    message = r"the state of client 3 cannot be read from .*/0\.r0\.states: it is no pack of states"
    with reader.reading(range(5)), pytest.raises(CheckpointError, match=message):
        reader.get(3)
    assert path.exists()


@pytest.mark.parametrize(
    "about",
    [
        None, {"state": "["}, {"state": "[]"}, {"state": "{}"}, {"other": "{}"}, {"state": "[" * 20_000},
        {"state": '{"clients": 3, "names": ["x"]}'}, {"state": '{"clients": ["3"]}'},
        {"state": '{"clients": ["3"], "names": ["gone"]}'}, {"state": '{"clients": ["0", "1", "3"], "names": ["x"]}'},
        {"state": '{"clients": ["3"], "names": ["x", "scalar"]}'},
    ],
    ids=range(11),
)  # fmt: skip
def test_a_pack_with_made_up_metadata_is_refused_by_its_name(tmp_path: Path, about: dict[str, str] | None) -> None:
    store = of_five(tmp_path)
    path = tmp_path / "0.r0.states"
    save_file({"x": torch.ones(2, 3), "steps": torch.ones(2), "scalar": torch.tensor(1.0)}, path, about)
    for reader in (store, opened(tmp_path, store.state_dict(), 1)):
        message = r"the state of client 3 cannot be read from .*/0\.r0\.states: it is no pack of states"
        with reader.reading(range(5)), pytest.raises(CheckpointError, match=message):
            reader.get(3)


@settings(deadline=None, max_examples=300)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans())
def test_a_flipped_bit_or_a_cut_is_told_with_the_damaged_file(place: int, bit: int, cut: bool) -> None:
    with TemporaryDirectory() as folder:
        store = of_five(Path(folder))
        path = Path(folder) / "0.r0.states"
        content = bytearray(path.read_bytes())
        place %= len(content)
        if cut:
            del content[place:]
        else:
            content[place] ^= 1 << bit
        path.write_bytes(content)
        reader, told = opened(Path(folder), store.state_dict(), 1), list[str]()
        for client_id in range(5):
            try:
                assert value(reader, client_id) == float(client_id)
            except CheckpointError as error:
                told.append(str(error))
        assert told
        assert all("0.r0.states" in line and "\n" not in line for line in told)
