"""Every data module in groups: the weights of training one client after the other, with several batches a client."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from PIL import Image
from torch.utils.data import DataLoader, Dataset, random_split

from lit_fed.data import (
    ArrayFile,
    ClientArrays,
    ClientFolders,
    CSVText,
    Diabetes,
    Digits,
    Domains,
    FederatedDataModule,
    HeartDisease,
    HuggingFace,
    LogNormal,
    Natural,
    Table,
    Wrapped,
)
from lit_fed.tasks import Classifier, Regressor
from tests.data.formats.test_heart_disease import write as hospitals
from tests.data.formats.test_wrapped import Sum, Visits, samples
from tests.data.loaders.test_worker_loader import NoisyModule
from tests.support import assert_same, fit, weights

SIZES = (23, 16, 9)  # training samples of a client, in batches of 5: 5, 4 and 2, or 4, 3 and 1 without the last


def arrays() -> dict[str, np.ndarray]:
    """Natural clients with `SIZES` training samples and two test samples each."""
    rng, whole = np.random.default_rng(0), {}
    for part, sizes in (("train", SIZES), ("test", (2, 2, 2))):
        whole[f"client_{part}"] = np.repeat(np.arange(3), sizes)
        whole[f"x_{part}"] = rng.normal(size=(sum(sizes), 4)).astype(np.float32)
        whole[f"y_{part}"] = (whole[f"x_{part}"][:, 0] > 0).astype(np.int64)
    return whole


def array_file(root: Path, **kwargs: Any) -> FederatedDataModule:
    np.savez(root / "a.npz", **arrays())
    return ArrayFile(str(root / "a.npz"), partition=Natural(), **kwargs)


def client_arrays(root: Path, **kwargs: Any) -> FederatedDataModule:
    whole = arrays()
    for client in range(3):
        (root / f"client_{client}").mkdir()
        own = {part: whole[f"client_{part}"] == client for part in ("train", "test")}
        held = {f"{axis}_{part}": whole[f"{axis}_{part}"][mask] for axis in "xy" for part, mask in own.items()}
        np.savez(root / f"client_{client}" / "data.npz", **held)
    return ClientArrays(3, [4], 2, root=str(root), **kwargs)


def table(root: Path, **kwargs: Any) -> FederatedDataModule:
    rng = np.random.default_rng(0)
    lines = [f"{who},{a},{b},{a + b}" for who, (a, b) in zip([*"abc"] * 20, rng.normal(size=(60, 2)), strict=True)]
    (root / "t.csv").write_text("\n".join(["who,a,b,y", *lines]))
    return Table(str(root / "t.csv"), "y", ["a", "b"], "who", **kwargs)


def texts(root: Path, **kwargs: Any) -> FederatedDataModule:
    rows = "\n".join(["label,text", *(f"{row % 2},{('good', 'bad')[row % 2]} word {row}" for row in range(60))])
    for part in ("train", "test"):
        (root / f"{part}.csv.gz").write_bytes(gzip.compress(rows.encode()))
    return CSVText(root=str(root), num_classes=2, length=4, vocab_size=32, num_clients=3, **kwargs)


def folders(root: Path, **kwargs: Any) -> FederatedDataModule:
    for client, size in enumerate(SIZES):
        for row in range(size):
            place = root / f"c{client}" / f"k{row % 2}"
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4), (10 * row, 100 * client, 90 * (row % 2))).save(place / f"{row}.png")
    return ClientFolders(root=str(root), image_size=4, test_fraction=0.2, crop_padding=1, **kwargs)


def hugging_face(root: Path, **kwargs: Any) -> FederatedDataModule:
    datasets = pytest.importorskip("datasets")
    rng = np.random.default_rng(0)
    columns = {"a": rng.normal(size=60), "b": rng.normal(size=60), "y": rng.integers(0, 2, 60), "who": [*"abc"] * 20}
    datasets.DatasetDict(train=datasets.Dataset.from_dict(columns)).save_to_disk(root / "set")
    return HuggingFace(str(root / "set"), ["a", "b"], "y", client="who", **kwargs)


def given(train: Dataset[Any], test: Dataset[Any], drop_last: bool, workers: int = 0) -> LightningDataModule:
    module = LightningDataModule()
    options: dict[str, Any] = {"batch_size": 5, "drop_last": drop_last, "num_workers": workers}
    module.train_dataloader = lambda: DataLoader(train, shuffle=True, **options)  # type: ignore[method-assign]
    module.test_dataloader = lambda: DataLoader(test, 5)  # type: ignore[method-assign]
    return module


def wrapped(workers: int = 0, sites: bool = False) -> Callable[..., FederatedDataModule]:
    def make(root: Path, batch_size: int, drop_last: bool) -> FederatedDataModule:
        train, test = (Visits(61, 0), Visits(9, 1)) if sites else (samples(61, 0), samples(9, 1))
        parted = random_split(train, [60, 1], torch.Generator().manual_seed(0))[0]
        module = given(parted, test, drop_last, workers)
        return Wrapped(module, client="site") if sites else Wrapped(module, num_clients=3, partition=LogNormal(0.5))

    return make


def domains(root: Path, **kwargs: Any) -> FederatedDataModule:
    parts = {name: Digits(max_train_samples=size) for name, size in zip("abc", SIZES, strict=True)}
    return Domains(parts, max_test_samples=30, **kwargs)  # type: ignore[arg-type]  # a mapping of names


CUT: dict[str, Any] = {"num_clients": 3, "partition": LogNormal(0.5)}
MODULES: dict[str, Callable[..., FederatedDataModule]] = {
    "ArrayFile": array_file,
    "ClientArrays": client_arrays,
    "ClientFolders": folders,
    "CSVText": texts,
    "DatasetModule": lambda root, **kwargs: NoisyModule(**CUT, **kwargs),
    "Diabetes": lambda root, **kwargs: Diabetes(max_train_samples=60, **CUT, **kwargs),
    "Digits": lambda root, **kwargs: Digits(max_train_samples=60, max_test_samples=30, **CUT, **kwargs),
    "Domains": domains,
    "HeartDisease": lambda root, **kwargs: HeartDisease(root=str(hospitals(root)), **kwargs),
    "HuggingFace": hugging_face,
    "Table": table,
    "Wrapped": wrapped(),
    "Wrapped, a process": wrapped(workers=1),
    "Wrapped, fields and names": wrapped(sites=True),
}


def task(name: str, data: FederatedDataModule) -> Any:
    torch.manual_seed(0)
    if name == "Wrapped, fields and names":
        return Sum()
    shape: dict[str, Any] = {"in_channels": data.in_channels, "input_shape": data.input_shape}
    if name == "CSVText":
        shape["network_args"] = {"vocab_size": 32}
    if data.num_classes is None:
        return Regressor("logistic", num_outputs=1, **shape)
    network = "embedding_bag" if name == "CSVText" else "logistic"
    return Classifier(network, num_classes=data.num_classes, **shape)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_groups_train_as_one_client_after_the_other(name: str, drop_last: bool, tmp_path: Path) -> None:
    found = []
    for executor in ("sequential", "vectorized"):
        root = tmp_path / executor
        root.mkdir()
        data = MODULES[name](root, batch_size=5, drop_last=drop_last)
        made = fit(root, task(name, data), data, max_rounds=2, executor=executor, evaluate_every=0)
        found.append(weights(made))
        sizes = {k: data.census.num_samples(k) for k in range(data.num_clients)}
        steps = {k: len(data.train_loader(k, torch.Generator())) for k in sizes}  # type: ignore[arg-type]
        # ⌈n/5⌉ batches, or ⌊n/5⌋, but one of fewer than five samples
        assert steps == {k: max(1, n // 5) if drop_last else -(-n // 5) for k, n in sizes.items()}
        assert max(steps.values()) > 1
        data.teardown("fit")
    # `vectorized` trains in groups or refuses; its sums are rounded in another order.
    for key, tensor in found[0].items():
        torch.testing.assert_close(found[1][key], tensor, rtol=1e-4, atol=1e-6)
    with pytest.raises(AssertionError):
        assert_same(found[0], {key: torch.zeros_like(tensor) for key, tensor in found[0].items()})
