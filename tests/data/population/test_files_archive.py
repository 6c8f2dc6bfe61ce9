"""Archives of arrays: their keys, headers and values, and one line for whatever is damaged."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fed.data import ArrayFile, ClientArrays, Digits
from lit_fed.data.population.files import Archive, write_archive
from lit_fed.errors import ConfigError
from tests.support import small_disk

X, Y = np.arange(4000, dtype=np.uint8).reshape(40, 10, 10), np.arange(40) % 2
PARTS = {"x_train": X, "y_train": Y, "x_test": X[:8], "y_test": Y[:8]}


def torn(path: Path, **arrays: Any) -> Path:
    """A compressed archive whose bytes in the middle are others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)
    content = bytearray(path.read_bytes())
    begin = content.index(b"x_train.npy" if "x_train" in arrays else b"x.npy") + 60
    content[begin : begin + 40] = b"\xff" * 40
    path.write_bytes(content)
    return path


def test_an_archive_is_known_by_its_keys_and_headers_before_its_values(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **PARTS)
    archive = Archive(tmp_path / "a.npz", ["x_train"], "write it")
    assert archive.keys == list(PARTS)
    assert archive.header("x_train") == ((40, 10, 10), np.dtype(np.uint8))
    np.testing.assert_array_equal(archive.read("x_test")["x_test"], X[:8])


def test_damage_within_compressed_arrays_is_said_in_a_line_by_every_reader(tmp_path: Path) -> None:
    def set_up(data: ArrayFile | ClientArrays) -> None:
        data.setup()

    torn(tmp_path / "client_0" / "data.npz", **PARTS)
    path, inputs = torn(tmp_path / "a.npz", **PARTS), torn(tmp_path / "x.npz", x=X)
    digits = Digits()
    digits.setup()
    for read in (
        lambda: set_up(ArrayFile(str(path), num_clients=2)),
        lambda: set_up(ClientArrays(1, [1, 10, 10], 2, root=str(tmp_path))),
        lambda: digits.new_inputs(inputs),
    ):
        with pytest.raises(ConfigError, match=r"npz cannot be read \(.*\); save plain number arrays") as told:
            read()
        assert "\n" not in str(told.value)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.npz does not exist; write it"):
        _ = Archive(tmp_path / "gone.npz", ["x"], "write it").keys
    np.savez(tmp_path / "a.npz", y=Y)
    with pytest.raises(ConfigError, match=r"a\.npz lacks x; it has y"):
        Archive(tmp_path / "a.npz", ["x"], "write it").read("x")


def test_written_arrays_are_numpys_own(tmp_path: Path) -> None:
    arrays = {"x": np.arange(6.0).reshape(2, 3), "name": np.array("ä"), "empty": np.zeros((0, 4), np.int8)}
    write_archive(tmp_path / "a.npz", arrays)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array, strict=True)


def test_objects_are_refused_and_a_full_disk_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        write_archive(tmp_path / "a.npz", {"x": np.array([{}])})
    with small_disk(1000), pytest.raises(OSError, match="File too large"):
        write_archive(tmp_path / "b.npz", {"x": np.zeros(1000)})
    gc.collect()  # an archive that is still open would complain here, which fails a test
