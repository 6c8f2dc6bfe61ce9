"""Neighbouring populations: what one client holds changes no other client's update in a bit, or the run is refused.

The accountant bounds a client's own clipped update. It says nothing of what a client does to the data, the splits or
the computation of others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

import lit_fed.methods
from lit_fed.algorithm import ClientUpdate
from lit_fed.callbacks import Callback, Run
from lit_fed.data import ArrayFile, ClientArrays, ClientFolders, FederatedDataModule, Natural, Table
from lit_fed.data.partitions.csr import CSR, IntArray
from lit_fed.errors import ConfigError
from lit_fed.poses import ClientPoses, KeypointEstimator
from lit_fed.poses.data.people import Skeleton
from lit_fed.tasks import Classifier
from tests.poses.data.test_client_poses import NAMES, file
from tests.privacy.support import private, uniform
from tests.support import Points, fit

pytest.importorskip("dp_accounting")

METHODS = ("FedAvg", "FedProx", "Scaffold", "FedDyn", "Ditto", "FedPer", "FedNTD", "Moon")
SIZES = (20, 14, 11, 16)
"""Of which 13, 10, 8 and 11 train, in batches of eight; of a row more 14, so that the largest smaller batch has six."""
SHAPES = {"Table": (16,), "ClientFolders": (3, 4, 4)}
REFUSED = {
    ("ClientPoses", "FedNTD", "sequential"): "needs integer class labels",
    ("ClientPoses", "FedNTD", "vectorized"): "needs integer class labels",
}  # fmt: skip
CHANGES = ("as it was", "another client 0", "a row more of client 0")
Sample = tuple[NDArray[np.uint8], int]
Samples = list[list[Sample]]


def population(change: str) -> Samples:
    """Four clients' pictures of 4×4 pixels of two classes; every client has both."""
    found = []
    for client_id, size in enumerate(SIZES):
        seed = 50 if client_id == 0 and change == "another client 0" else client_id
        generator = np.random.default_rng(seed)
        size += client_id == 0 and change == "a row more of client 0"
        pictures = generator.integers(0, 256, (size, 4, 4), dtype=np.uint8)
        found.append([(picture, (row + seed) % 2) for row, picture in enumerate(pictures)])
    return found


def table(root: Path, samples: Samples) -> FederatedDataModule:
    lines = [
        ",".join([f"c{client_id}", f"k{label}", *map(str, picture.ravel() / 256)])
        for client_id, own in enumerate(samples)
        for picture, label in own
    ]
    names = ",".join(["client", "label", *(f"p{place}" for place in range(16))])
    (root / "table.csv").write_text("\n".join([names, *lines]))
    return Table(
        str(root / "table.csv"), "label", names.split(",")[2:], "client", standardise=False, class_names=["k0", "k1"],
        val_fraction=0.2, batch_size=8,
    )  # fmt: skip


def arrays(root: Path, samples: Samples) -> FederatedDataModule:
    for client_id, own in enumerate(samples):
        x, y = stacked(own)
        last = len(own) - len(own) // 5
        (root / f"client_{client_id}").mkdir()
        np.savez(
            root / f"client_{client_id}" / "data.npz",
            x_train=x[:last],
            y_train=y[:last],
            x_test=x[last:],
            y_test=y[last:],
        )
    return ClientArrays(len(samples), [1, 4, 4], 2, root=str(root), max_value=255, val_fraction=0.2, batch_size=8)


def array_file(root: Path, samples: Samples) -> FederatedDataModule:
    x, y = stacked([sample for own in samples for sample in own])
    clients = np.repeat(np.arange(len(samples)), [len(own) for own in samples])
    last = np.concatenate([np.arange(len(own)) % 3 == 0 for own in samples])
    parts = {"train": ~last, "test": last}
    content = {
        f"{key}_{part}": whole[at] for key, whole in zip("xy", (x, y), strict=True) for part, at in parts.items()
    }
    content |= {f"client_{part}": clients[at] for part, at in parts.items()}
    np.savez(root / "file.npz", **content)
    settings: dict[str, Any] = {"partition": Natural(), "test_fraction": 0.2, "val_fraction": 0.2, "batch_size": 8}
    return ArrayFile(str(root / "file.npz"), num_classes=2, **settings)


def folders(root: Path, samples: Samples) -> FederatedDataModule:
    for client_id, own in enumerate(samples):
        for row, (picture, label) in enumerate(own):
            place = root / f"c{client_id}" / f"k{label}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(place / f"{row:02}.png")
    return ClientFolders(root=str(root), class_names=["k0", "k1"], image_size=4, val_fraction=0.2, batch_size=8)


def poses(root: Path, samples: Samples) -> FederatedDataModule:
    for client_id, own in enumerate(samples):
        boxes = [[float(picture[0, 0] % 20), 10.0, 20.0, 30.0 + label] for picture, label in own]
        file(root / f"c{client_id}" / "train.json", [(row, {"bbox": box}) for row, box in enumerate(boxes, 1)])
    given: dict[str, Any] = {"skeleton": Skeleton(tuple(NAMES), edges=((0, 1),)), "box_heights": (30.0, 30.0)}
    return ClientPoses(str(root), resolutions=[(16, 12)], val_fraction=0.2, batch_size=8, **given)


def stacked(own: list[Sample]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    return np.stack([picture for picture, _ in own]), np.array([label for _, label in own])


MODULES: dict[str, Callable[[Path, Samples], FederatedDataModule]] = {
    "Table": table, "ClientArrays": arrays, "ArrayFile": array_file, "ClientFolders": folders, "ClientPoses": poses,
}  # fmt: skip


class Sent(Callback):
    """Keeps what every client sends."""

    def __init__(self) -> None:
        self.of: dict[int, dict[str, Tensor]] = {}

    def on_client_end(self, run: Run, update: ClientUpdate) -> None:
        self.of[update.client_id] = {name: tensor.clone() for name, tensor in update.payload.items()}


def sent(root: Path, module: str, method: str, executor: str, change: str) -> dict[int, dict[str, Tensor]] | str:
    """Every client's update of a round, before the server's sum; or why the run is refused."""
    place = root / change / "data"
    place.mkdir(parents=True)
    made = getattr(lit_fed.methods, method)
    seen = Sent()
    try:
        data = MODULES[module](place, population(change))
        torch.manual_seed(0)
        shape = SHAPES.get(module, (1, 4, 4))
        task: Any = Classifier("mlp", num_classes=2, in_channels=shape[0], input_shape=shape)
        if module == "ClientPoses":
            task = KeypointEstimator(
                "pose_vit_tiny", num_joints=5, network_args={"depth": 1, "embed_dim": 16}, flip_test=False
            )
        fit(
            root / change, task, data, made(**uniformly(made)), max_rounds=1, executor=executor, buffers="local",
            callbacks=[seen], evaluate_every=0, **private(100.0, 0.0),
        )  # fmt: skip
    except ConfigError as error:
        return str(error)
    return seen.of


def uniformly(made: Any) -> dict[str, Any]:
    try:
        made(weighting="uniform")
    except TypeError:
        return {}
    return {"weighting": "uniform"}


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("module", MODULES)
def test_no_other_client_sends_another_bit_or_the_run_is_refused(
    module: str, method: str, executor: str, tmp_path: Path
) -> None:
    found = [sent(tmp_path, module, method, executor, change) for change in CHANGES]
    if refused := REFUSED.get((module, method, executor)):
        assert all(isinstance(one, str) and refused in one for one in found), found
        return
    before, *others = (one for one in found if not isinstance(one, str))
    assert len(others) == 2, found
    assert any(not torch.equal(tensor, others[0][0][name]) for name, tensor in before[0].items())
    for after in others:
        assert before.keys() == after.keys() == set(range(len(SIZES)))
        for client_id in range(1, len(SIZES)):
            for name, tensor in before[client_id].items():
                assert torch.equal(tensor, after[client_id][name]), (client_id, name)


def test_the_pair_finds_a_hold_out_in_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(self: CSR, seed: int, owners: IntArray) -> NDArray[np.float64]:
        return np.random.default_rng(seed).random(len(owners))

    monkeypatch.setattr(CSR, "_random", stream)
    with pytest.raises(AssertionError):
        test_no_other_client_sends_another_bit_or_the_run_is_refused("Table", "FedAvg", "sequential", tmp_path)


def test_a_choice_among_all_clients_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.max_train_samples draws from all clients' samples at once"):
        fit(tmp_path, data=Points(8, (3, 3), max_train_samples=23), algorithm=uniform(), **private(1.0, 1.0))


def test_the_size_to_which_groups_pad_is_no_clients(tmp_path: Path) -> None:
    # Batches of 8; the largest smaller one has three samples.
    made = fit(tmp_path / "private", algorithm=uniform(), executor="vectorized", max_rounds=1, **private(1.0, 1.0))
    assert next(iter(made.run.federation.executor.groups.values())).pad_to == 7
