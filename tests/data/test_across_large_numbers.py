"""1e9 ± 1 through every reader: shifted and scaled in 64 bits, as NumPy does, and described as the files hold it.

In float32, numbers from 2^29 to 2^30 are 64 apart.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lit_fed.data import LEAF, ArrayFile, ClientArrays, FederatedDataModule, HuggingFace, Table
from lit_fed.data.loaders.transforms import Normalize, rebuild
from lit_fed.errors import ConfigError
from lit_fed.federation.statistics.federation import first_question, simulated
from lit_fed.federation.statistics.site import columns_of, exact_squares

ROWS = 90
RNG = np.random.default_rng(0)
X = np.stack([1e9 + np.arange(ROWS) % 3 - 1, 1.7e9 + RNG.uniform(-10, 10, ROWS), RNG.normal(size=ROWS)], axis=1)
Y = 1e9 + RNG.permutation(np.arange(ROWS) % 3 - 1)
NAMES = ("a", "b", "c")


def csv(path: Path) -> str:
    lines = [
        f"{','.join(map(repr, row))},{y!r},{'uv'[place % 2]}"
        for place, (row, y) in enumerate(zip(X.tolist(), Y.tolist(), strict=True))
    ]
    text = "\n".join(["a,b,c,y,who", *lines])
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def parquet(path: Path) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    columns = {name: X[:, place] for place, name in enumerate(NAMES)}
    files.write_table(pyarrow.table(columns | {"y": Y, "who": ["u", "v"] * (ROWS // 2)}), path)
    return str(path)


def table(path: str, **kwargs: Any) -> Table:
    return Table(path, "y", list(NAMES), "who", kind="numbers", **kwargs)


def archive(root: Path, x: NDArray[Any], scaled: bool = True) -> ArrayFile:
    np.savez(root / "a.npz", x_train=x[:60], y_train=Y[:60], x_test=x[60:], y_test=Y[60:])
    wide = x[:60].astype(np.float64)
    scale = {"mean": wide.mean(axis=0).tolist(), "std": wide.std(axis=0).tolist()} if scaled else {}
    return ArrayFile(str(root / "a.npz"), num_clients=2, **scale)


def folders(root: Path, x: NDArray[Any]) -> ClientArrays:
    for client, rows in enumerate((slice(0, 30), slice(30, 60))):
        (root / f"client_{client}").mkdir()
        parts = {"x_train": x[rows], "y_train": Y[rows], "x_test": x[60:75], "y_test": Y[60:75]}
        np.savez(root / f"client_{client}" / "data.npz", **parts)
    mean, std = x[:60].mean(axis=0).tolist(), x[:60].std(axis=0).tolist()
    return ClientArrays(2, [3], root=str(root), mean=mean, std=std)


def hugging_face(root: Path, arrays: bool) -> HuggingFace:
    datasets = pytest.importorskip("datasets")
    columns = {name: X[:, place] for place, name in enumerate(NAMES)} | {"all": X.tolist(), "y": Y}
    datasets.DatasetDict(train=datasets.Dataset.from_dict(columns)).save_to_disk(root / "set")
    scale: dict[str, Any] = {"mean": X.mean(axis=0).tolist(), "std": X.std(axis=0).tolist()}
    return HuggingFace(str(root / "set"), "all" if arrays else list(NAMES), "y", kind="numbers", num_clients=2, **scale)


READERS: dict[str, Callable[[Path], FederatedDataModule]] = {
    "CSV": lambda root: table(csv(root / "t.csv")),
    "CSV, gzipped": lambda root: table(csv(root / "t.csv.gz")),
    "Parquet": lambda root: table(parquet(root / "t.parquet")),
    "ArrayFile": lambda root: archive(root, X),
    "ArrayFile of integers": lambda root: archive(root, np.rint(X).astype(np.int64)),
    "ClientArrays": lambda root: folders(root, X),
    "HuggingFace": lambda root: hugging_face(root, arrays=False),
    "HuggingFace, lists": lambda root: hugging_face(root, arrays=True),
}


def stored_rows(data: FederatedDataModule) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The training rows and targets of the file, by the target and the features as they were written."""
    held = [data.stored_loader(client) for client in range(data.num_clients)]
    x, y = zip(*[(x.numpy(), y.numpy()) for loader in held for x, y in loader], strict=True)
    return np.concatenate(x), np.concatenate(y)


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_shifts_and_scales_in_64_bits(reader: str, tmp_path: Path) -> None:
    data = READERS[reader](tmp_path)
    data.setup()
    x, _ = stored_rows(data)
    whole = np.rint(X) if "integers" in reader else X
    assert {*map(tuple, x.tolist())} <= {*map(tuple, whole.tolist())}, "as the file holds them"
    (step,) = data.preprocessing() or []
    mean, std = np.array(step["mean"]), np.array(step["std"])
    if isinstance(data, Table):  # by the training rows alone
        np.testing.assert_allclose(mean, x.mean(axis=0), rtol=1e-15)
        np.testing.assert_allclose(std, np.sqrt(((x - x.mean(axis=0)) ** 2).mean(axis=0)), rtol=1e-7)
    wanted = ((x - mean) / std).astype(np.float32)
    own = [data.train_loader(client, torch.Generator()) for client in range(data.num_clients)]
    seen = np.concatenate([batch[0].numpy() for loader in own for batch in loader])
    assert seen.dtype == np.float32
    # One rounding to 24 bits; values of 64 bits that differ stay apart.
    seen, wanted = seen[np.lexsort(seen.T)], wanted[np.lexsort(wanted.T)]
    np.testing.assert_allclose(seen, wanted, rtol=2**-22, atol=2**-22)
    for place in range(3):
        assert len(np.unique(seen[:, place])) == len(np.unique(x[:, place]))
    # The preprocessing of checkpoints and of exported programs gives the same bits.
    module, inputs = rebuild(data.preprocessing() or []), torch.from_numpy(x)
    bits = Normalize(**{key: value for key, value in step.items() if key != "step"})(inputs)
    assert torch.equal(module(inputs), bits)
    assert {*map(tuple, bits.tolist())} == {*map(tuple, seen.tolist())}
    exported = torch.export.export(module, (inputs,)).module()
    assert torch.equal(exported(inputs), bits)
    shape, dtype = data.stored_like() or ((), "")
    assert (shape, dtype) == ((3,), "int64" if "integers" in reader else "float64")


@pytest.mark.parametrize("reader", READERS)
def test_statistics_are_those_of_the_files_values(reader: str, tmp_path: Path) -> None:
    data = READERS[reader](tmp_path)
    data.keeps_missing = True
    question = first_question(columns_of(data), 4, 1, None, None)
    data.setup()
    x, y = stored_rows(data)
    found = simulated(data, question).as_dict()["all"]["columns"]
    described = [column for column in found if column["role"] != "size"]  # which a `HuggingFace` has, without values
    for column, values in zip(described, [*x.T, y], strict=True):
        exact = [Fraction(value) for value in values.tolist()]
        mean = sum(exact) / len(exact)
        variance = sum((value - mean) ** 2 for value in exact) / len(exact)
        assert (column["mean"], column["variance"]) == (float(mean), float(variance))
        assert (column["minimum"], column["maximum"]) == (values.min(), values.max())
    assert set(y.tolist()) == {1e9 - 1, 1e9, 1e9 + 1}


@pytest.mark.parametrize("reader", READERS)
def test_numerical_targets_are_described_in_64_bits_and_trained_in_32(
    reader: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = READERS[reader](tmp_path)
    data.setup()
    values = data.target_values(data._ready.train.indices)
    assert values is not None
    assert set(values.tolist()) == {1e9 - 1, 1e9, 1e9 + 1}
    targets = torch.cat([y for _, y in data.train_loader(0, torch.Generator())])
    assert targets.dtype == torch.float32
    assert set(targets.tolist()) == {1e9}
    said = capsys.readouterr().out
    name = "y" if isinstance(data, Table | HuggingFace) else "column 0"
    assert f"32 bits merge 3 distinct values of {name} into 1; shift and scale them" in said


def test_partitions_cut_by_targets_of_64_bits(tmp_path: Path) -> None:
    data = table(csv(tmp_path / "t.csv"), strata=3)
    data.setup()
    of_row = data._ready.strata
    assert of_row is not None
    assert np.array_equal(of_row, data.target_values(np.arange(len(of_row))) - (1e9 - 1))


def test_a_line_counts_the_values_that_32_bits_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table(csv(tmp_path / "t.csv"), standardise=False).setup()
    said = capsys.readouterr().out
    several = len(np.unique(X[:, 1].astype(np.float32)))
    assert several < 3
    assert "32 bits merge 3 distinct values of a into 1, and 1 other column lose some; shift and scale them" in said
    plain = np.random.default_rng(1).normal(size=(ROWS, 3))
    archive(tmp_path, plain, scaled=False).setup()
    assert "distinct values of column 0" in capsys.readouterr().out  # the targets
    archive(tmp_path, X, scaled=False).setup()
    assert capsys.readouterr().out.count("32 bits merge 3 distinct values of column 0") == 2


def test_numbers_of_32_bits_far_from_0_are_scaled_in_64_bits(tmp_path: Path) -> None:
    """float32 holds 1e9 ± 64 exactly; times a scale and plus a shift in float32, errors are near a third."""
    x = (1e9 + 64 * (np.arange(ROWS)[:, None] % 7)).astype(np.float32)
    data = archive(tmp_path, x)
    data.setup()
    wide = x.astype(np.float64)
    wanted = {*((wide - wide[:60].mean()) / wide[:60].std()).astype(np.float32).ravel().tolist()}
    seen = torch.cat([x for x, _ in data.test_loader()])
    np.testing.assert_allclose(sorted(set(seen.ravel().tolist())), sorted(wanted), rtol=1e-6)


def test_values_near_0_are_scaled_in_32_bits_as_ever() -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    normalize = Normalize([0.5, 0.4, 0.3], [0.2, 0.3, 0.25], max_value=1.0)
    scale, shift = (1 / torch.tensor([0.2, 0.3, 0.25]).double()).float(), torch.tensor([-2.5, -4 / 3, -1.2])
    torch.testing.assert_close(normalize(x), torch.addcmul(shift, x, scale), rtol=0, atol=1e-6)
    assert not normalize.is_wide(torch.float32)


def test_leaf_takes_pixels_in_64_bits(tmp_path: Path) -> None:
    def written(pixel: float) -> LEAF:
        own = {"x": [[pixel, *[1.0] * 783]] * 6, "y": [0] * 6}
        content = {"users": ["f0"], "num_samples": [6], "user_data": {"f0": own}}
        (tmp_path / "a.json").write_text(json.dumps(content))
        return LEAF("femnist", root=str(tmp_path))

    with pytest.raises(ConfigError, match="not 784 numbers from 0 to 1"):
        written(1 + 1e-9).setup()  # 1 in float32
    data = written(0.1)
    data.keeps_missing = True
    question = first_question(columns_of(data), 4, 1, None, None)
    data.setup()
    (column,) = simulated(data, question).as_dict()["all"]["columns"]
    assert column["minimum"] == 0.1
    assert column["mean"] == float((Fraction(0.1) + 783) / 784)


def test_squares_are_summed_exactly() -> None:
    values = np.concatenate([1e9 + np.arange(-3.0, 4), RNG.normal(size=99) * 1e-9, [3e38, -1e-30, 0.1]])
    assert exact_squares(values) == sum(Fraction(value) ** 2 for value in values.tolist())
    small, weights = np.arange(5.0), np.array([3, 1, 0, 2, 7])
    assert exact_squares(small, weights) == 0 * 3 + 1 + 0 + 9 * 2 + 16 * 7


def test_a_run_on_seconds_of_an_hour_learns_from_them(tmp_path: Path) -> None:
    """The target is a line of the second; in float32 an hour around 1.7e9 has 29 values."""
    at = 1.7e9 + np.arange(0, 3600, 30)
    lines = [f"{second!r},{second - 1.7e9 - 1800!r}" for second in at.tolist()]
    (tmp_path / "t.csv").write_text("\n".join(["t,y", *lines]))
    data = Table(str(tmp_path / "t.csv"), "y", ["t"], kind="numbers", num_clients=2)
    data.setup()
    seen = torch.cat([x for x, _ in data.train_dataloader()])
    assert len(seen.unique()) == len(seen) == 96
