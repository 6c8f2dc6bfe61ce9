"""No client's data reach the others before training: what is computed over several clients is a setting, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from lit_fed.algorithm import ClientUpdate
from lit_fed.callbacks import Callback, Run
from lit_fed.data import (
    ArrayFile,
    ClientArrays,
    ClientFolders,
    CSVText,
    Digits,
    Dirichlet,
    FederatedDataModule,
    Table,
    Wrapped,
)
from lit_fed.errors import ConfigError
from lit_fed.poses import ClientPoses, Mpii
from lit_fed.tasks import Classifier
from tests.privacy.support import private, uniform
from tests.support import fit

pytest.importorskip("dp_accounting")
REPLACED = 0
"""The client whose data differ between neighbours."""


def table(folder: Path, other: bool) -> str:
    """Four clients; with `other` the first one's rows are extreme, and of a new class."""
    lines = ["a,b,kind,site"]
    for client in range(4):
        odd = other and client == REPLACED
        for row in range(10):
            kind = "z" if odd else "xy"[row % 2]
            lines.append(f"{1e4 if odd else row},{-row * client},{kind},{client}")
    folder.mkdir(exist_ok=True)
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return str(folder / "table.csv")


class Watch(Callback):
    """Keeps the clients' updates."""

    def __init__(self) -> None:
        self.sent: dict[int, list[float]] = {}

    def on_client_end(self, run: Run, update: ClientUpdate) -> None:
        self.sent[update.client_id] = [one for part in update.payload.values() for one in part.flatten().tolist()]


def model(data: FederatedDataModule) -> Classifier:
    shape = {"num_classes": data.num_classes, "input_shape": data.input_shape}
    return Classifier("mlp", **shape, network_args={"hidden": [8]})


class Plain(LightningDataModule):
    """Labelled vectors."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(8, 2), torch.tensor([0, 1] * 4)), batch_size=4)

    test_dataloader = train_dataloader


def pictures(folder: Path) -> None:
    from PIL import Image

    for client in ("a", "b"):
        for kind in ("x", "y"):
            (folder / client / kind).mkdir(parents=True)
            for number in range(5):
                Image.new("RGB", (4, 4)).save(folder / client / kind / f"{number}.png")


def cases(folder: Path) -> dict[str, tuple[FederatedDataModule, str]]:
    """Data with something to compute over several clients, and the line's beginning."""
    path = table(folder, False)
    rng = np.random.default_rng(0)
    arrays = {f"x_{part}": rng.random((20, 2)).astype(np.float32) for part in ("train", "test")}
    arrays |= {f"y_{part}": np.arange(20) % 2 for part in ("train", "test")}
    np.savez(folder / "data.npz", **arrays)
    (folder / "t.csv").write_text("label,text\n" + "0,a b\n1,c d\n" * 10)
    pictures(folder / "pictures")
    for client in range(2):
        (folder / "arrays" / f"client_{client}").mkdir(parents=True)
        np.savez(folder / "arrays" / f"client_{client}" / "data.npz", **arrays)
    scale: dict[str, Any] = {"mean": [0.0, 0.0], "std": [1.0, 1.0]}
    return {
        "standardise": (Table(path, "kind", client="site"), "data.standardise"),
        "classes": (Table(path, "kind", client="site", **scale), "data.class_names"),
        "kind": (Table(path, "b", ["a"], "site", standardise=False), "data.class_names"),
        "strata": (Table(path, "b", ["a"], standardise=False, kind="numbers", strata=2), "data.strata"),
        "features": (Table(path, "kind", client="site", standardise=False, class_names=["x", "y"]), "data.features"),
        "arrays": (ArrayFile(str(folder / "data.npz"), num_clients=2), "data.num_classes"),
        "texts": (CSVText("t.csv", "t.csv", root=str(folder), num_clients=2), "data.num_classes"),
        "wrapped": (Wrapped(Plain(), num_clients=2), "data.num_classes"),
        "folders": (ClientFolders(str(folder / "pictures")), "data.class_names"),
        "clients": (ClientArrays(2, [2], 2, root=str(folder / "arrays")), "data.max_value"),
    }


CASES = ["standardise", "classes", "kind", "strata", "features", "arrays", "texts", "wrapped", "folders", "clients"]


@pytest.mark.parametrize("case", CASES)
def test_a_value_computed_over_all_clients_is_named_by_its_key(case: str, tmp_path: Path) -> None:
    found = cases(tmp_path)
    assert [*found] == CASES
    data, key = found[case]
    data.prepare_data()
    data.setup("fit")
    line = data.pooled()
    assert line is not None
    assert line.startswith(key)


def test_a_private_run_refuses_it_in_one_line_before_there_is_a_folder(tmp_path: Path) -> None:
    data = Table(table(tmp_path, False), "kind", client="site")
    with pytest.raises(ConfigError, match=r"^trainer\.privacy: data\.standardise takes .*; give data\.mean [^\n]*$"):
        fit(tmp_path / "run", model(data), data=data, algorithm=uniform(), **private(0.5, 1.0))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("withhold", [False, True])
def test_a_private_run_does_not_count_clients_without_a_class(
    withhold: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Digits(num_clients=5, partition=Dirichlet(0.1), val_fraction=0.5)
    settings = private(0.5, 1.0, withhold=withhold)
    fit(
        tmp_path,
        Classifier("logistic", num_classes=10, input_shape=(1, 8, 8)),
        data,
        uniform(),
        max_rounds=1,
        **settings,
    )
    assert data.census.untaught() is not None
    assert (data.census.untaught() in capsys.readouterr().out) is not withhold


def test_poses_whose_pictures_shrink_by_all_boxes_and_joints_of_a_first_file_are_refused() -> None:
    assert "data.skeleton" in (ClientPoses().pooled() or "")
    assert "data.antialias" in (Mpii(antialias=True).pooled() or "")
    assert Mpii().pooled() is None


def test_a_class_that_the_setting_does_not_name_is_refused(tmp_path: Path) -> None:
    data = Table(table(tmp_path, True), "kind", client="site", class_names=["x", "y"])
    with pytest.raises(ConfigError, match=r"target 'z' is not a class of data\.class_names, which have x, y"):
        data.setup("fit")
    pictures(tmp_path / "pictures")
    with pytest.raises(ConfigError, match=r"has a class folder y, which data\.class_names does not name; add it"):
        ClientFolders(str(tmp_path / "pictures"), class_names=["x", "w"]).setup("fit")


def test_given_scales_of_a_table_are_its_preprocessing(tmp_path: Path) -> None:
    data = Table(table(tmp_path, False), "kind", client="site", mean=[1.0, 2.0], std=[3.0, 4.0])
    data.setup("fit")
    normalize = data.normalization()
    assert normalize(torch.tensor([[4.0, 10.0]])).tolist() == [[1.0, 2.0]]
    with pytest.raises(ConfigError, match=r"data\.mean has 1 values for 2 features; give one each"):
        Table(table(tmp_path, False), "kind", client="site", mean=[1.0], std=[3.0]).setup("fit")
    with pytest.raises(ConfigError, match=r"data\.mean and data\.std belong together"):
        Table("t.csv", "kind", mean=[1.0])
