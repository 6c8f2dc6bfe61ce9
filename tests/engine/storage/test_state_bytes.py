"""States as bytes: what is worked out once for many is what safetensors gives for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_fed.engine.storage.state_bytes import Form, StateBytes, about, packed, unpacked

TYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8,
    torch.bool,
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
@given(LAYOUTS, st.lists(OWNERS, min_size=1, max_size=5, unique=True), st.booleans())
def test_several_are_read_as_each_alone(layout: Any, owners: list[str], foreign: bool) -> None:
    ours, states = StateBytes(), {owner: drawn(layout, seed) for seed, owner in enumerate(owners)}
    blobs = {owner: ours.encode(owner, state) for owner, state in states.items()}
    if foreign:
        blobs["8x"] = packed("8x", {"of another": torch.zeros(3)})
    found = ours.decode_all(blobs)
    assert found.keys() <= states.keys()
    assert all(same(found[owner], states[owner]) for owner in found)
    plain = {owner for owner in owners if owner.isascii() and owner.isalnum()}
    if layout and all(dtype in (torch.float32, torch.int64) and 0 not in shape for dtype, shape in layout.values()):
        assert found.keys() >= plain


@settings(deadline=None)
@given(st.lists(st.tuples(LAYOUTS, OWNERS), min_size=1, max_size=4), st.data())
def test_bytes_are_those_of_safetensors(kept: Any, data: Any) -> None:
    ours = StateBytes()
    for seed in range(2 * len(kept)):  # a form is made by a first one and used by others
        layout, owner = data.draw(st.sampled_from(kept))
        state = drawn(layout, seed)
        blob = ours.encode(owner, state)
        assert blob == packed(owner, state)
        assert about(blob) == {"client": owner, "names": list(state)}
        assert same(ours.decode(owner, blob), state)
        assert same(StateBytes().decode(owner, blob), state)
        assert same(unpacked(blob), state)


def test_a_state_of_another_owner_or_form_is_no_state_of_this_one() -> None:
    layout = (("x", torch.float32, torch.Size([2])), ("y", torch.int64, torch.Size([])))
    state = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor(3)}
    form, blob = Form(layout), packed("7", state)
    decoded = form.decode("7", blob)
    assert decoded is not None
    assert same(decoded, state)
    other = packed("7", {"x": torch.zeros(2), "z": torch.tensor(3)})
    assert len(other) == len(blob)
    for owner, bytes_of_it in (("8", blob), ("7", blob[:-1]), ("7", blob + b"\0"), ("7", other), ("7", b"")):
        assert form.decode(owner, bytes_of_it) is None


def test_what_numpy_does_not_have_has_no_form() -> None:
    with pytest.raises(ValueError, match="no form"):
        Form((("x", torch.bfloat16, torch.Size([2])),))


def test_a_large_state_is_written_as_safetensors_does() -> None:
    ours, state = StateBytes(), {"x": torch.arange(2**18 + 1, dtype=torch.float32)}
    blob = ours.encode("0", state)
    assert ours._forms == {}
    assert blob == packed("0", state)
    assert same(ours.decode("0", blob), state)


def test_what_is_read_may_be_changed_without_changing_what_is_read_next() -> None:
    ours, blob = StateBytes(), packed("0", {"x": torch.zeros(2)})
    for _ in range(3):
        found = ours.decode("0", blob)["x"]
        assert found.tolist() == [0.0, 0.0]
        found.add_(1.0)
