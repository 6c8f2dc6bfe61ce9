"""Tensors of messages: safetensors' format, and how often their bytes are in memory."""

from __future__ import annotations

import json
import struct
import warnings
from typing import Any

import pytest
import safetensors.torch
import torch

from lit_fed.errors import WireError
from lit_fed.federation.messages.body import Blob, pack_tensors, read_tensors
from lit_fed.federation.messages.wire import Bodies, Message, decode, encode, encode_shared
from lit_fed.federation.transport.frames import CHUNK, Joiner, divide
from lit_fed.tensors import is_aligned

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip

ALL_SHAPES = {"three": (3,), "first": (1000, 1000), "five": (5,), "head": (10, 13), "last": (16,), "none": (0, 2)}


def drawn() -> list[torch.Tensor]:
    """Of every type, of no elements, of no dimensions, transposed, and two that share memory."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in DTYPES:
        content = torch.randint(0, 2, (3, 5, dtype.itemsize), dtype=torch.uint8, generator=generator)
        found.append(content.view(dtype).squeeze(-1) if dtype.itemsize > 1 else content.squeeze(-1).view(dtype))
    one = torch.randn(4, 6, generator=generator)
    return [*found, torch.empty(0, 3), torch.tensor(2.5), one.T, one, one[1:3]]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return not one.numel() or torch.equal(
        one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
    )


def test_the_package_reads_what_is_written_and_the_other_way_round() -> None:
    tensors = drawn()
    for place, found in safetensors.torch.load(bytes(pack_tensors(tensors))).items():
        assert same(found, tensors[int(place)]), place
    apart = {str(place): tensor.clone().contiguous() for place, tensor in enumerate(tensors)}
    read = read_tensors(bytearray(safetensors.torch.save(apart)), 0)
    assert read.keys() == apart.keys()
    for place, found in read.items():
        assert same(found, apart[place]), place


def test_a_received_message_is_in_memory_once() -> None:
    """Its tensors are views of what was received: a value that is written into the bytes is the tensor's."""
    tensors = {"w": torch.zeros(1000, 300), "b": torch.zeros(7)}
    joiner, whole = Joiner(lambda _: 2**31), None
    for frame in divide(1, encode(Message("train", {}, {"payload": tensors}))):
        whole = joiner.take(frame)
    assert whole is not None
    found = decode(whole[1]).tensors["payload"]
    assert {tensor.untyped_storage().data_ptr() for tensor in found.values()} <= set(
        range(found["w"].data_ptr() - 2**13, found["w"].data_ptr() + len(whole[1]))
    )
    found["w"][-1, -1] = 1.0
    again = decode(whole[1]).tensors["payload"]
    assert torch.equal(again["w"], found["w"])
    assert all(map(is_aligned, found.values()))
    before = bytes(whole[1])
    decode(before).tensors["payload"]["w"].fill_(2.0)  # bytes are not written to
    assert bytes(whole[1]) == before


def test_tensors_of_whole_blocks_are_views_wherever_the_others_stand() -> None:
    """Only what is of no whole blocks, such as biases, is copied where it does not begin at a multiple of 64 bytes."""
    tensors = {name: torch.randn(*shape) for name, shape in ALL_SHAPES.items()}
    blob = encode_shared(Message("train", {}, {"payload": tensors}), Bodies())
    for whole in (encode(Message("train", {}, {"payload": tensors})), bytearray(bytes(blob))):
        joiner, content = Joiner(lambda _: 2**31), None
        for frame in divide(1, whole):
            content = joiner.take(frame)
        assert content is not None
        found = decode(content[1]).tensors["payload"]
        assert all(same(found[name], tensor) and is_aligned(found[name]) for name, tensor in tensors.items())
        begin = torch.frombuffer(content[1], dtype=torch.uint8).data_ptr()
        within = {name for name, tensor in found.items() if 0 <= tensor.data_ptr() - begin < len(content[1])}
        assert {"first", "last"} <= within  # 4 MB and 64 bytes
        assert not {"three", "five"} <= within


def test_messages_to_many_nodes_share_one_copy_of_the_model() -> None:
    tensors, bodies = {"w": torch.ones(3 * CHUNK // 4 + 5)}, Bodies()
    blobs = [encode_shared(Message("train", {"client": i}, {"payload": tensors}), bodies) for i in range(10)]
    assert len({id(blob.body) for blob in blobs}) == 1
    for place, blob in enumerate(blobs[:2]):
        assert bytes(blob) == encode(Message("train", {"client": place}, {"payload": tensors}))
        assert len(blob) == len(bytes(blob))
        assert list(divide(7, blob)) == list(divide(7, bytes(blob)))
    other = encode_shared(Message("train", {}, {"payload": {"w": torch.ones(3)}}), bodies)
    assert other.body is not blobs[0].body
    del blobs, blob
    assert len(bodies) == 1  # none is kept for messages that are answered


@pytest.mark.parametrize("split", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_frames_do_not_show_where_a_message_has_its_parts(split: int) -> None:
    content = torch.arange(2 * CHUNK + 9).to(torch.uint8).numpy().tobytes()
    body = encode_shared(Message("hello"), Bodies()).body
    parts = Blob(content[:split], type(body)(content[split:]))
    assert list(divide(3, parts)) == list(divide(3, content))


def written(entries: dict[str, Any], content: bytes) -> bytearray:
    text = json.dumps(entries).encode()
    return bytearray(struct.pack("<Q", len(text)) + text + content)


def entry(begin: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("entries", "size"),
    [
        ({"0": entry(0, 4)}, 3),  # less than it says
        ({"0": entry(0, 4)}, 5),  # more
        ({"0": entry(0, 4), "1": entry(0, 4)}, 4),  # twice the same bytes
        ({"0": entry(0, 4), "1": entry(2, 6)}, 6),  # overlapping
        ({"0": entry(0, 4), "1": entry(8, 12)}, 12),  # a hole
        ({"0": entry(4, 0)}, 4),
        ({"0": entry(-4, 0)}, 4),
        ({"0": entry(0, 4, shape=(2,))}, 4),
        ({"0": entry(0, 4, shape=(-1, -1))}, 4),
        ({"0": entry(0, 4, dtype="F33")}, 4),
        ({"0": entry(0, 0, shape=(0, 2**63))}, 0),
        ({"0": entry(0, 0, shape=(2**40,) * 60)}, 0),
        ({"0": entry(0, 4, shape=(1,) * 100)}, 4),
        ({"0": {"dtype": "F32", "shape": [1]}}, 4),
        ({"__metadata__": {"a": "b"}, "0": entry(0, 4)}, 4),
        ({"0": []}, 4),
    ],
)
def test_tensors_that_are_not_where_they_belong_are_refused(entries: dict[str, Any], size: int) -> None:
    body = written(entries, bytes(size))
    header = json.dumps({"word": "hello", "groups": ["a"], "names": [["a", "x"]], "fields": {}}).encode()
    header += b" " * (-len(header) % 8)
    with pytest.raises(WireError, match="a message cannot be read"):
        decode(struct.pack("<4sI", b"LFW1", len(header)) + header + bytes(body))


def test_an_unaligned_tensor_is_read_from_a_copy() -> None:
    body = written({"0": entry(0, 1, "U8"), "1": entry(1, 5)}, b"\x07" + struct.pack("<f", 2.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_tensors(body, 0)
    assert (found["0"].item(), found["1"].item()) == (7, 2.5)
    assert is_aligned(found["1"])
