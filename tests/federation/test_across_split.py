"""A data set cut into folders: an end that has its own folder only does what it would have done with all the data."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from lit_fed.command.cli import main
from lit_fed.command.command import Call
from lit_fed.command.reading.words import CommandLine
from lit_fed.data import ClientArrays, Digits, RandomTransform
from lit_fed.errors import ConfigError
from lit_fed.federation.commands import node
from lit_fed.federation.commands.deployed import make
from lit_fed.federation.node.node import Node
from lit_fed.federation.server.federate import federate
from lit_fed.federation.transport.grid import MemoryGrid
from lit_fed.parsing import Parser
from tests.data.formats.test_table_gaps import FEATURES, WARDS, patients
from tests.methods.run_methods import CONFIGS
from tests.support import ROOT, assert_same, rows, saved_weights, small_disk

SMALL = [
    *("--data.num_clients", "3", "--trainer.participation", "FullParticipation", "--trainer.max_rounds", "2"),
    *("--trainer.local_epochs", "1", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"),
]
DIABETES = str(CONFIGS / "data" / "diabetes.yaml")
QUICKSTART = ["-c", str(ROOT / "configs" / "quickstart.yaml"), *SMALL]


def method(name: str) -> str:
    return str(CONFIGS / "method" / f"{name}.yaml")


class TwoResolutions(Digits):
    """Every other client sees its samples otherwise."""

    def view(self, client_id: int) -> Any:
        return (lambda batch: batch) if client_id % 2 else None


class Scaled(Digits):
    """Is prepared by code."""

    def normalization(self) -> Any:
        return lambda batch: batch.float() / 16


class Noise(RandomTransform):
    """Nothing that a setting stands for."""

    num_draws = 0

    def draw(self, num_images: int, generator: Any) -> Any: ...

    def apply(self, images: Any, draws: Any) -> Any: ...


class Noisy(Digits):
    """Has a random transform of its own."""

    def augmentation(self) -> Any:
        return Noise()


def parts(words: list[str]) -> Any:
    """The parts of a run, made as a command makes them."""
    parser = Parser(exit_on_error=False)
    node.add_arguments(parser)
    line = CommandLine(["node", *words, "--client", "0"])
    return make(Call(line.parse(parser), parser, line.words))


def split(words: list[str], folder: Path) -> None:
    """Cut the data, and move every end's folder to where the others' are not."""
    main(["split", *words, "--output", str(folder / "all")])
    for path in sorted((folder / "all").iterdir()):
        if path.is_dir() and path.name != "public":
            shutil.copytree(path, folder / path.name / path.name)
            if (folder / "all" / "public").is_dir():
                shutil.copytree(folder / "all" / "public", folder / path.name / "public")
    shutil.rmtree(folder / "all")


def federated(folder: Path) -> Path:
    """Train over three nodes that have their own client's folder, and a server that has its own."""

    def own(name: str) -> list[str]:
        root = folder / name
        given = ["--data.root", str(root), "--trainer.default_root_dir", str(root)]
        return ["-c", str(root / name / "config.yaml"), *given]

    with ExitStack() as stack:
        handlers = {}
        for one in range(3):
            trainer, made = parts(own(f"client_{one}"))
            home = Node(trainer, *made, [one], folder / f"client_{one}" / "states", say=lambda line: None)
            handlers[one + 1] = stack.enter_context(home.at_work()).handle
        trainer, made = parts(own("server"))
        federate(MemoryGrid(handlers), trainer, *made)
    return Path(trainer.log_dir)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="fedavg"),
        pytest.param(["-c", method("scaffold"), "--data.horizontal_flip", "true"], id="scaffold, mirrored"),
        pytest.param(["--data.crop_padding", "1", "--data.image_size", "12", "--data.val_fraction", "0"], id="resized"),
        pytest.param(["-c", method("uwa"), "--algorithm.public_size", "100"], id="public set, calibration"),
        pytest.param(["-c", DIABETES, "--model", "Regressor", "--model.network", "mlp"], id="regression"),
    ],
)
def test_a_federation_over_split_folders_ends_in_the_simulations_bits(tmp_path: Path, more: list[str]) -> None:
    words = [*QUICKSTART[:2], *more, *SMALL]
    main(["fit", *words, "--trainer.default_root_dir", str(tmp_path / "one")])
    split(words, tmp_path / "split")
    other = federated(tmp_path / "split")
    one = tmp_path / "one" / "lightning_logs" / "version_0"
    assert_same(saved_weights(one), saved_weights(other))
    for simulated, deployed in zip(rows(one / "metrics.csv"), rows(other / "metrics.csv"), strict=True):
        # A server has no shared validation set: it chooses by its clients' means.
        timed = {name for name in simulated if name.startswith(("time/", "drift/", "val/"))}
        assert {key: deployed[key] for key in simulated.keys() - timed} == {
            key: simulated[key] for key in simulated.keys() - timed
        }


def test_a_table_with_gaps_and_categories_is_split_into_inputs(tmp_path: Path) -> None:
    """The folders hold what the network sees before it is scaled, without NaN."""
    path = patients(tmp_path)
    words = [*QUICKSTART[:2], *("--data", "Table", "--data.path", str(path), "--data.target", "ill"), *SMALL]
    words += ["--data.client", "site", "--data.features", str(FEATURES), "--data.impute", "median"]
    words += ["--data.levels", str({"ward": WARDS}), "--model.network", "mlp", "--data.partition", "Natural"]
    main(["fit", *words, "--trainer.default_root_dir", str(tmp_path / "one")])
    split(words, tmp_path / "split")
    with np.load(tmp_path / "split" / "client_1" / "client_1" / "data.npz") as arrays:
        assert arrays["x_train"].shape[1:] == (9,)
        assert np.isfinite(arrays["x_train"]).all()
    one = tmp_path / "one" / "lightning_logs" / "version_0"
    assert_same(saved_weights(one), saved_weights(federated(tmp_path / "split")))


def test_a_federation_over_folders_of_photographs_ends_in_the_simulations_bits(tmp_path: Path) -> None:
    words = ["-c", str(CONFIGS / "papers" / "raf" / "runs" / "puppets.yaml"), *SMALL[2:]]
    words += ["--data.samples_per_client", "5", "--data.test_samples", "4", "--data.val_fraction", "0.2"]
    split([*words, "--trainer.evaluate_every", "1"], tmp_path / "split")
    other = federated(tmp_path / "split")
    for one in range(3):
        shutil.copytree(tmp_path / "split" / f"client_{one}" / f"client_{one}", tmp_path / "all" / f"client_{one}")
    shutil.copytree(tmp_path / "split" / "server" / "server", tmp_path / "all" / "server")
    config = str(tmp_path / "all" / "server" / "config.yaml")
    main(
        ["fit", "-c", config, "--data.root", str(tmp_path / "all"), "--trainer.default_root_dir", str(tmp_path / "one")]
    )
    one = tmp_path / "one" / "lightning_logs" / "version_0"
    assert_same(saved_weights(one), saved_weights(other))
    simulated, deployed = (rows(at / "metrics.csv")[-1] for at in (one, other))
    tested = [name for name in simulated if name.startswith("global/")]
    assert tested
    assert {name: deployed[name] for name in tested} == {name: simulated[name] for name in tested}


def test_without_the_shared_test_set_clients_metrics_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split(QUICKSTART, tmp_path)
    (tmp_path / "server" / "server" / "data.npz").unlink()
    log_dir = federated(tmp_path)
    found = rows(log_dir / "metrics.csv")[-1]
    assert "clients/acc_mean" in found
    assert not [name for name in found if name.startswith("global/")]
    assert "global" in capsys.readouterr().out


def test_folders_together_are_a_population_like_others(tmp_path: Path) -> None:
    main(["split", *QUICKSTART, "--output", str(tmp_path / "all")])
    main(["fit", *QUICKSTART, "--trainer.default_root_dir", str(tmp_path / "one")])
    config = str(tmp_path / "all" / "server" / "config.yaml")
    main(
        ["fit", "-c", config, "--data.root", str(tmp_path / "all"), "--trainer.default_root_dir", str(tmp_path / "two")]
    )
    assert_same(*(saved_weights(tmp_path / name / "lightning_logs" / "version_0") for name in ("one", "two")))
    assert not [path for path in (tmp_path / "all").rglob("*") if path.stat().st_mode & 0o077]  # its user's alone
    (told,) = (tmp_path / "all").rglob("README.md")  # none beside the one that provision writes for an end
    assert told.parent == tmp_path / "all"
    assert "and so on to `client_2`" in told.read_text()
    with pytest.raises(SystemExit):
        main(["split", *QUICKSTART, "--output", str(tmp_path / "all")])


# ---------------------------------------------------------------------- files


def client(root: Path, owner: int | str = 0, **arrays: Any) -> Path:
    path = root / (owner if isinstance(owner, str) else f"client_{owner}") / "data.npz"
    path.parent.mkdir(exist_ok=True)
    x, y = np.arange(40, dtype=np.float32).reshape(10, 4), np.arange(10) % 2
    own = {} if isinstance(owner, str) else {"x_train": x, "y_train": y}
    np.savez(path, **{**own, "x_test": x[:4], "y_test": y[:4], **arrays})
    return path


def ready(root: Path, clients: Any = None, reserve: Any = (0, 0.0), **kwargs: Any) -> ClientArrays:
    data = ClientArrays(root=str(root), **{"num_clients": 2, "stored_shape": [4], "num_classes": 2, **kwargs})
    data.reserve(*reserve)
    data.setup("fit", clients)
    return data


def test_an_end_reads_its_own_clients_files_only(tmp_path: Path) -> None:
    client(tmp_path, 1)
    data = ready(tmp_path, [1])
    assert (data.census.num_samples(1), list(data.census.class_counts(1)), data.test_loader(1).num_samples) == (
        10,
        [5, 5],
        4,
    )
    assert data.test_loader().num_samples == 0
    with pytest.raises(ConfigError, match="client 0's data are not here"):
        data.test_loader(0)
    with pytest.raises(
        ConfigError, match=r"data\.npz does not exist; set data\.root to the folder that holds client_0"
    ):
        ready(tmp_path)


def test_what_is_held_out_of_a_file_follows_from_the_seed_and_the_client(tmp_path: Path) -> None:
    for one in (0, 1):
        client(tmp_path, one)
    alone, both = ready(tmp_path, [1], (0, 0.3), val_fraction=0.2), ready(tmp_path, None, (0, 0.3), val_fraction=0.2)
    for data in (alone, both):
        sizes = [len(data._cut.train[1]), len(data._cut.val[1]), len(data._cut.calibration[1])]
        assert sizes == [6, 2, 2]  # 2 of 10 to validate on; 0.3 of the 8 that are left, rounded down
    assert alone.census.fingerprint(1) == both.census.fingerprint(1) != both.census.fingerprint(0)
    assert ready(tmp_path, [1], (0, 0.3), val_fraction=0.2, seed=1).census.fingerprint(1) != alone.census.fingerprint(1)


def test_fractions_that_leave_a_client_one_sample_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client(tmp_path, 1)
    ready(tmp_path, [1], val_fraction=0.9)
    said = "data.val_fraction 0.9 and algorithm.calibration_fraction 0 leave client 1 one sample to train on, of 10\n"
    assert capsys.readouterr().out == said


def test_a_client_is_known_by_its_values(tmp_path: Path) -> None:
    client(tmp_path, 0)
    before = ready(tmp_path, [0]).census.fingerprint(0)
    changed = np.arange(40, dtype=np.float32).reshape(10, 4)
    changed[3, 1] += 1
    client(tmp_path, 0, x_train=changed)
    assert ready(tmp_path, [0]).census.fingerprint(0) != before


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x_train": np.zeros((10, 3), np.float32)}, r"one input of x_train has shape \(3,\); it must be data"),
        ({"x_train": np.zeros((9, 4), np.float32)}, "x_train and y_train differ in length"),
        ({"x_train": np.zeros((10, 4), np.uint16)}, "x_train holds uint16; it must be"),
        ({"y_train": np.full(10, 2)}, "label 2 of sample 0 is not in 0 … 1"),
        ({"y_train": np.zeros(10)}, r"y_train have shape \(10,\) of float64; they must be integers, one per sample"),
        ({"y_test": np.array(["a"] * 4)}, r"y_test have shape \(4,\) of <U1; they must be integers"),
        ({"x_train": np.full((10, 4), np.nan, np.float32)}, "sample 0 holds NaN or infinity"),
        ({"y_train": np.array([{}] * 10, dtype=object)}, r"data.npz cannot be read \(Object arrays cannot be loaded"),
        ({"x_test": np.float32(3)}, "x_test and y_test differ in length"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_are_named(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    client(tmp_path, 0, **arrays)
    with pytest.raises(ConfigError, match=words):
        ready(tmp_path, [0])


def test_damaged_and_incomplete_files_are_named(tmp_path: Path) -> None:
    path = client(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"client_0/data\.npz cannot be read"):
        ready(tmp_path, [0])
    np.savez(path, x_train=np.zeros((2, 4)))
    with pytest.raises(ConfigError, match=r"client_0/data\.npz lacks y_train, x_test, y_test; it has x_train"):
        ready(tmp_path, [0])
    np.savez(path, x_test=np.zeros((0, 4)), y_test=np.zeros(0), x_train=np.zeros((0, 4)), y_train=np.zeros(0))
    assert ready(tmp_path, [0]).census.num_samples(0) == 0
    client(tmp_path, 0)
    client(tmp_path, "public", x_public=np.zeros((5, 4), np.float32), y_public=np.zeros(5, np.int64))
    with pytest.raises(ConfigError, match=r"holds 5 samples and algorithm\.public_size is 6"):
        ready(tmp_path, [0], (6, 0.0))
    assert ready(tmp_path, [0], (5, 0.0)).public_loader().num_samples == 5


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"stored_shape": []}, "data.stored_shape is"),
        ({"stored_shape": [0]}, "data.stored_shape is"),
        ({"num_classes": 0}, "data.num_classes is 0"),
        ({"target_shape": [2]}, "exclude each other"),
        ({"class_names": ["a"]}, "has 1 names for 2 classes"),
        ({"max_train_samples": 5}, "ClientArrays takes no data.max_train_samples"),
        ({"crop_padding": 1}, "is not that of images"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ready(tmp_path, [], **kwargs)


def test_a_full_disk_leaves_no_half_of_a_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["split", *QUICKSTART[:2], "--output", "out"]
    with small_disk(5000), pytest.raises(SystemExit):
        main(words)
    assert capsys.readouterr().err.startswith("lit-fed: error: cannot write out: [Errno 27] File too large")
    assert not list(tmp_path.iterdir())
    main(words)  # the folder's name is free
    assert (tmp_path / "out" / "server" / "data.npz").is_file()


class Plain(LightningDataModule):
    """Two classes of pictures, without clients."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.rand(40, 1, 8, 8), torch.arange(40) % 2), batch_size=10)

    test_dataloader = train_dataloader


PLAIN = [f"{__name__}.Plain", "--data.num_clients", "2", "--data.partition", "IID"]
PRIVACY = [f"--trainer.privacy{word}" for word in ("=SampleLevel", ".clip_norm=1", ".noise_multiplier=1")]
FOLDERS = ["ClientFolders", "--data.root", "faces", "--data.num_clients", "2", "--data.partition", "Natural"]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (FOLDERS, "ClientFolders reads samples one by one; give each node the files of its clients, or write their"),
        (
            [*PLAIN, *PRIVACY, "--data.num_classes=2"],
            "Wrapped reads samples one by one; give each node the files of its clients, or write their samples to "
            "client_0/data.npz and so on for ClientArrays\n",
        ),
        ([*PLAIN, *PRIVACY], "trainer.privacy: data.num_classes is counted over all clients' labels; give it\n"),
        ([f"{__name__}.TwoResolutions"], "has views or a skew, which lit-fed split cannot write"),
        ([f"{__name__}.Scaled"], "has a custom normalization, which lit-fed split cannot write"),
        ([f"{__name__}.Noisy"], "has a custom augmentation, which lit-fed split cannot write"),
    ],
)
def test_data_that_cannot_be_split_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: list[str], told: str
) -> None:
    from PIL import Image

    for owner, label in ((owner, label) for owner in "ab" for label in "cd"):
        folder = tmp_path / "faces" / owner / label
        folder.mkdir(parents=True)
        for place in range(5):
            Image.new("RGB", (8, 8)).save(folder / f"{place}.png")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["split", *QUICKSTART[:2], "--data", *data, "--output", "out"])
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_folder_has_the_same_configuration(tmp_path: Path) -> None:
    main(["split", *QUICKSTART, "--output", str(tmp_path / "all")])
    texts = {path.read_text() for path in (tmp_path / "all").glob("*/config.yaml")}
    assert len(texts) == 1
    content = yaml.safe_load(texts.pop())
    assert content["model"]["init_args"]["num_classes"] == 10
    assert content["data"]["init_args"]["stored_shape"] == [1, 8, 8]
