"""The data sets, read from files written here in their published formats."""

from __future__ import annotations

import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_fed.data import CIFAR10, CIFAR100, ArrayFile, DigitPairs, Digits, Dirichlet, FashionMNIST, Natural
from lit_fed.errors import ConfigError


def ready(module: Any) -> Any:
    module.prepare_data()
    module.setup()
    return module


def everything(loader: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(loader)
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def test_digits_are_split_80_20_within_each_class():
    data = ready(Digits(num_clients=5))
    x_train, y_train = everything(data.train_dataloader())
    x_test, y_test = everything(data.test_loader())
    # scikit-learn documents 1,797 samples: 178 182 177 183 181 182 181 179 174 180 of the classes 0 … 9.
    counts = np.array([178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    np.testing.assert_array_equal(np.bincount(y_test), np.round(counts * 0.2))
    np.testing.assert_array_equal(np.bincount(y_train) + np.bincount(y_test), counts)
    assert x_train.shape[1:] == (1, 8, 8) == data.input_shape
    assert (data.num_classes, data.in_channels, data.image_size) == (10, 1, 8)
    pixels = torch.cat([x_train, x_test])
    assert abs(pixels.mean()) < 1e-3
    assert abs(pixels.std() - 1) < 1e-3
    # 0 is the darkest and 16 the brightest pixel: (0 − .3053)/.376 and (1 − .3053)/.376
    assert pixels.min() == pytest.approx(-0.8120, abs=1e-4)
    assert pixels.max() == pytest.approx(1.8476, abs=1e-4)


def test_digits_have_one_test_set_whatever_the_seed():
    first, second = (everything(ready(Digits(num_clients=5, seed=seed)).test_loader())[0] for seed in (0, 1))
    assert torch.equal(first, second)


def test_digit_pairs_are_two_digits_of_one_side_of_the_split():
    pairs, digits = DigitPairs().load_arrays(), Digits().load_arrays()
    # 100 images of each of 00 … 99 to train on and 20 to test on
    np.testing.assert_array_equal(np.bincount(pairs.train.y), np.full(100, 100))
    np.testing.assert_array_equal(np.bincount(pairs.test.y), np.full(100, 20))
    for x, y, of_x, of_y in (
        (pairs.train.x, pairs.train.y, digits.train.x, digits.train.y),
        (pairs.test.x, pairs.test.y, digits.test.x, digits.test.y),
    ):
        what = {image.tobytes(): int(label) for image, label in zip(of_x, of_y, strict=True)}
        read = [10 * what[i[..., :8].tobytes()] + what[i[..., 8:].tobytes()] for i in x]
        assert read == y.tolist()


def test_digit_pairs_keep_their_shape():
    data = ready(DigitPairs(num_clients=100))
    assert (data.input_shape, data.num_classes, len(data.class_names)) == ((1, 8, 16), 100, 100)
    assert data.class_names[7] == "07"
    x, y = everything(data.test_loader())
    assert x.shape == (2000, 1, 8, 16)
    assert y[:3].tolist() == [0, 1, 2]


def test_images_are_resized_on_the_fly():
    data = ready(Digits(num_clients=2, image_size=16))
    assert data.input_shape == (1, 16, 16)
    assert next(iter(data.train_loader(0, torch.Generator())))[0].shape == (50, 1, 16, 16)


def write_fashion_mnist(root: Path) -> np.ndarray:
    """The IDX format: a magic number, the sizes in big-endian order, the bytes."""
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8)
    labels = (np.arange(40) % 10).astype(np.uint8)
    for name, part in (("train", slice(0, 30)), ("t10k", slice(30, 40))):
        count = part.stop - part.start
        header = struct.pack(">IIII", 0x00000803, count, 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + images[part].tobytes())
        header = struct.pack(">II", 0x00000801, count)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(header + labels[part].tobytes())
    return images


def test_fashion_mnist_reads_the_published_files(tmp_path):
    images = write_fashion_mnist(tmp_path)
    data = FashionMNIST(root=str(tmp_path), num_clients=2)
    assert (data.num_classes, data.input_shape) == (10, (1, 28, 28))
    x, y = everything(ready(data).test_loader())
    np.testing.assert_allclose(x[:, 0], (images[30:] / 255 - 0.2860) / 0.3530, rtol=1e-5, atol=1e-5)
    assert y.tolist() == list(range(10))


def test_classes_have_the_names_of_the_data_set(tmp_path, monkeypatch):
    write_fashion_mnist(tmp_path)
    clothes = FashionMNIST(root=str(tmp_path), num_clients=2)
    assert clothes.class_names is None, "not known before the files are read"
    assert ready(clothes).class_names[::9] == ["T-shirt/top", "Ankle boot"]
    assert ready(Digits()).class_names == list("0123456789")


def write_cifar(root: Path, reader: Any, label_key: str, num_classes: int, monkeypatch: Any) -> np.ndarray:
    """The python version of CIFAR: rows of 3,072 bytes, red, green, blue, each row by row."""
    folder = root / reader.base_folder
    folder.mkdir()
    rows = np.random.default_rng(0).integers(0, 256, (20, 3072), dtype=np.uint8)
    for names in ("train_list", "test_list"):
        listed = []
        for name, _ in getattr(reader, names):
            content = pickle.dumps({"data": rows, label_key: [i % num_classes for i in range(20)]})
            (folder / name).write_bytes(content)
            listed.append([name, hashlib.md5(content).hexdigest()])
        monkeypatch.setattr(reader, names, listed)
    content = pickle.dumps({reader.meta["key"]: [str(i) for i in range(num_classes)]})
    (folder / reader.meta["filename"]).write_bytes(content)
    monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": hashlib.md5(content).hexdigest()})
    return rows


@pytest.mark.parametrize(
    ("cls", "label_key", "mean", "std", "count"),
    [
        (CIFAR10, "labels", [0.485, 0.456, 0.406], [0.229, 0.224, 0.225], 5 * 20),
        (CIFAR100, "fine_labels", [0.507, 0.487, 0.441], [0.267, 0.256, 0.276], 20),
    ],
)
def test_cifar_reads_the_published_files(cls, label_key, mean, std, count, tmp_path, monkeypatch):
    data = cls(root=str(tmp_path), num_clients=2, crop_padding=4, horizontal_flip=True, val_fraction=0.5)
    rows = write_cifar(tmp_path, data.reader, label_key, data.num_classes, monkeypatch)
    assert data.input_shape == (3, 32, 32)
    x, y = everything(ready(data).test_loader())
    pixels = rows.reshape(20, 3, 32, 32) / 255
    expected = (pixels - np.array(mean)[:, None, None]) / np.array(std)[:, None, None]
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-5)
    assert y.tolist() == [i % data.num_classes for i in range(20)]
    assert data.class_names == [str(i) for i in range(data.num_classes)]
    assert data.census.num_samples(0) == count // 4  # two clients, half held out
    # Validation images are as they are; training images are not.
    originals = {image.numpy().tobytes() for image in x}
    assert all(image.numpy().tobytes() in originals for image in everything(data.val_loader())[0])
    trained = everything(data.train_loader(0, torch.Generator()))[0]
    assert not all(image.numpy().tobytes() in originals for image in trained)


@pytest.mark.parametrize(
    ("cls", "file"),
    [
        (FashionMNIST, "FashionMNIST/raw"),
        (CIFAR10, "cifar-10-batches-py"),
        (CIFAR100, "cifar-100-python"),
    ],
)
def test_missing_files_are_listed_with_their_folder(cls, file, tmp_path):
    with pytest.raises(ConfigError) as error:
        ready(cls(root=str(tmp_path)))
    message = str(error.value)
    assert str(tmp_path / file) in message
    assert all(name in message for name in cls.files)
    assert "data.download" in message
    assert "\n" not in message


def write_archive(path: Path, **changes: Any) -> Path:
    arrays: dict[str, Any] = {
        "x_train": np.arange(12 * 4 * 4, dtype=np.uint8).reshape(12, 4, 4),
        "y_train": np.arange(12) % 3,
        "x_test": np.zeros((6, 4, 4), dtype=np.uint8),
        "y_test": np.arange(6) % 3,
        **changes,
    }
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def test_an_archive_of_grey_images(tmp_path):
    write_archive(tmp_path / "tiny.npz")
    data = ArrayFile(root=str(tmp_path), name="tiny", num_clients=2)
    assert (data.num_classes, data.input_shape, data.in_channels) == (3, (1, 4, 4), 1)
    x, y = everything(ready(data).train_dataloader())
    order = torch.argsort(x[:, 0, 0, 0])
    # Image i begins with byte 16·i.
    torch.testing.assert_close(x[order][:, 0, 0, 0], torch.arange(12) * 16 / 255)
    assert y[order].tolist() == [0, 1, 2] * 4


def test_an_archive_of_colour_images(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
    path = write_archive(tmp_path / "a.npz", x_train=np.concatenate([images, images]), x_test=images)
    data = ready(ArrayFile(path=str(path), num_clients=2, mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5]))
    assert data.input_shape == (3, 5, 4)
    x, _ = everything(data.test_loader())
    np.testing.assert_allclose(x, (images.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5, rtol=1e-5, atol=1e-6)


def test_an_archive_of_windows_with_natural_clients(tmp_path):
    windows = np.random.default_rng(0).normal(size=(12, 9, 16)).astype(np.float16)
    path = write_archive(
        tmp_path / "har.npz",
        x_train=windows,
        x_test=windows[:6],
        client_train=np.array([3, 3, 3, 30, 30, 30, 30, 7, 7, 7, 7, 7]),
        client_test=np.array([7, 3, 99, 30, 30, 3]),
    )
    data = ArrayFile(path=str(path), partition=Natural())
    assert data.num_clients == 3
    assert (data.input_shape, data.in_channels, data.image_size) == ((9, 16), 9, None)
    ready(data)
    assert [data.census.num_samples(k) for k in range(3)] == [3, 5, 4]  # clients 3, 7, 30
    x, _ = everything(data.test_loader(2))
    assert x.dtype == torch.float32
    np.testing.assert_array_equal(x, windows[[3, 4]].astype(np.float32))
    assert data.test_loader().num_samples == 6


def test_what_stands_for_one_can_be_told(tmp_path):
    path = write_archive(tmp_path / "a.npz", x_test=np.full((6, 4, 4), 8, dtype=np.uint8))
    x, _ = everything(ready(ArrayFile(path=str(path), num_clients=2, max_value=16.0)).test_loader())
    assert (x == 0.5).all()


def test_people_who_are_only_tested_become_clients_where_the_splits_are_joined(tmp_path):
    # Four people with six windows each: two to train on, two others to test on, as in UCI-HAR.
    windows = np.arange(24, dtype=np.float16).reshape(24, 1, 1)
    path = write_archive(
        tmp_path / "har.npz",
        x_train=windows[:12],
        x_test=windows[12:],
        y_test=np.arange(12) % 3,
        client_train=np.repeat([1, 3], 6),
        client_test=np.repeat([2, 4], 6),
    )
    official = ready(ArrayFile(path=str(path), partition=Natural()))
    assert official.num_clients == 2
    # Nobody has test samples of their own: two of each class match what a client trains on.
    _, y = everything(official.test_loader(0))
    assert sorted(y.tolist()) == [0, 0, 1, 1, 2, 2]
    joined = ready(ArrayFile(path=str(path), partition=Natural(), test_fraction=0.34))
    assert joined.num_clients == 4
    first_of = {0: 0, 1: 12, 2: 6, 3: 18}  # the order of the people, not of the files
    for client_id, first in first_of.items():
        train, test = (
            everything(loader)[0].flatten().tolist()
            for loader in (joined.train_loader(client_id, torch.Generator()), joined.test_loader(client_id))
        )
        assert (len(train), len(test)) == (4, 2)  # ⌊0.34·6⌋ = 2
        assert sorted(train + test) == list(range(first, first + 6))


def test_an_archive_of_feature_vectors(tmp_path):
    x = np.eye(12, 5)
    data = ArrayFile(path=str(write_archive(tmp_path / "a.npz", x_train=x, x_test=x[:6])), num_clients=3)
    assert data.input_shape == (5,)
    np.testing.assert_array_equal(everything(ready(data).test_loader())[0], x[:6])


def test_fewer_natural_clients_are_the_first_ones(tmp_path):
    path = write_archive(tmp_path / "a.npz", client_train=np.arange(12) // 3)
    data = ready(ArrayFile(path=str(path), partition=Natural(), num_clients=2))
    assert sorted(data.record.as_dict()["clients"][1]["indices"]) == [3, 4, 5]


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"y_test": None}, {}, "lacks y_test"),
        ({"y_train": np.array([0, 1, 2, -1] * 3)}, {}, "label -1 of sample 3"),
        ({"y_test": np.array([0, 1, 2, 3, 4, 5])}, {}, "label 3 of sample 3 is not in 0 … 2"),
        ({}, {"num_classes": 2}, "label 2 of sample 2 is not in 0 … 1"),
        ({"y_train": np.arange(12) / 2}, {"num_classes": 3}, "they must be integers, one per sample"),
        ({"y_train": np.arange(12) / 2}, {}, "a.npz are int64; give floating-point numbers"),
        ({"y_train": np.arange(11) % 3}, {}, "12 train samples but 11 labels"),
        ({"y_train": np.array([None] * 12)}, {}, "cannot be read"),
        ({"x_test": np.zeros((6, 4, 5), dtype=np.uint8)}, {}, "differ in shape"),
        ({"x_train": np.zeros(12)}, {}, "x_train has shape (12,)"),
        ({"x_train": np.array(["a"] * 12).reshape(12, 1)}, {}, "must be uint8 or floating point"),
        ({"client_train": np.arange(3)}, {}, "client_train and y_train differ in length"),
        ({"client_train": np.arange(12)}, {"test_fraction": 0.5}, "for one split only"),
        ({}, {"test_fraction": 1.0}, "data.test_fraction is 1.0"),
        ({}, {"partition": Natural()}, "names the client of each sample"),
        ({"x_train": np.zeros((12, 3, 4)), "x_test": np.zeros((6, 3, 4))}, {"crop_padding": 2}, "holds no images"),
        ({}, {"mean": [0.5] * 3, "std": [0.5] * 3}, "data.mean has 3 values, but inputs have 1 channels"),
    ],
)
def test_archives_that_cannot_work(changes, settings, message, tmp_path):
    path = write_archive(tmp_path / "a.npz", **changes)
    with pytest.raises(ConfigError) as error:
        everything(ready(ArrayFile(path=str(path), **{"num_clients": 2, **settings})).test_loader())
    assert message in str(error.value)
    assert str(path) in str(error.value) or settings
    assert "\n" not in str(error.value)


def test_archives_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.npz does not exist; set data\.path"):
        _ = ArrayFile(root=str(tmp_path), name="absent").num_classes
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ConfigError, match=r"text\.npz cannot be read \(File is not a zip file\)"):
        _ = ArrayFile(path=str(tmp_path / "text.npz")).input_shape
    with pytest.raises(ConfigError, match=r"either data\.path"):
        ArrayFile()
    with pytest.raises(ConfigError, match=r"either data\.path"):
        ArrayFile(path="a.npz", name="a")
    with pytest.raises(ConfigError, match="belong together"):
        ArrayFile(path="a.npz", mean=[0.5])


def test_moving_to_a_device_keeps_the_data():
    data = Digits(num_clients=3, partition=Dirichlet(1.0))
    data.reserve(public_size=20)
    ready(data)
    before = [everything(data.test_loader())[0], everything(data.public_loader())[0]]
    data.move_to(torch.device("cpu"))
    after = [everything(data.test_loader())[0], everything(data.public_loader())[0]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
