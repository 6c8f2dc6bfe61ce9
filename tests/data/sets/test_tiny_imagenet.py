"""Tiny-ImageNet, read from small folders written here as they are published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lit_fed.data import TinyImageNet
from lit_fed.errors import ConfigError
from tests.data.test_across_datasets import everything, ready

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def write_tiny(root: Path) -> Path:
    """Two classes of three training images and one to test on, each of one grey: 50 in class 0, 150 in class 1."""
    folder = root / "tiny-imagenet-200"
    wnids = ["n02", "n01"]  # as they stand in wnids.txt, which is not sorted
    for label, wnid in enumerate(wnids):
        images = folder / "train" / wnid / "images"
        images.mkdir(parents=True)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
        for number in range(3):
            Image.new("RGB", (64, 64), (100 * label + 50,) * 3).save(images / f"{wnid}_{number}.JPEG")
    tested = folder / "val" / "images"
    tested.mkdir(parents=True)
    Image.new("L", (64, 64), 150).save(tested / "val_0.JPEG")  # some of the published images are grey
    Image.new("RGB", (64, 64), (50, 50, 50)).save(tested / "val_1.JPEG")
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\t0\t62\t62\nval_1.JPEG\tn02\t0\t0\t9\t9\n")
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (folder / "words.txt").write_text("n01\tbird, fowl\nn02\tgoldfish, Carassius auratus\nn99\tother\n")
    return folder


@pytest.mark.parametrize("side", [64, 32])
def test_tiny_imagenet_reads_the_published_folders(side: int, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    data = TinyImageNet(root=str(tmp_path), num_clients=2, image_size=side, crop_padding=0)
    assert (data.num_classes, data.input_shape) == (2, (3, side, side))
    assert data.class_names == ["goldfish", "bird"]
    x, y = everything(ready(data).test_loader())
    assert y.tolist() == [1, 0]
    assert x.shape == (2, 3, side, side)
    for image, grey in zip(x, (150, 50), strict=True):  # in JPEG, one grey stays what it is
        np.testing.assert_allclose(image[:, 0, 0], (grey / 255 - MEAN) / STD, rtol=1e-4)
    assert sum(data.census.num_samples(client) for client in range(2)) == 6
    images, labels = everything(data.train_loader(0, torch.Generator()))
    np.testing.assert_allclose(images[:, 0, 0, 0], ((labels * 100 + 50) / 255 - 0.485) / 0.229, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("wnids.txt", None, r"wnids\.txt does not exist; TinyImageNet reads tiny-imagenet-200 as published"),
        ("wnids.txt", "\n", r"wnids\.txt is empty"),
        ("wnids.txt", "n01\nn03\n", r"n03/images holds no \.JPEG files"),
        (
            "val/val_annotations.txt",
            "val_0.JPEG\tn03\t0\t0\t9\t9\n",
            r"names 'n03' for val_0\.JPEG, which is not in wnids",
        ),
        ("val/val_annotations.txt", "val_0.JPEG", r"names '' for val_0\.JPEG"),
    ],
)
def test_tiny_imagenet_that_cannot_be(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path) / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        ready(TinyImageNet(root=str(tmp_path), num_clients=2))


def test_an_image_that_is_damaged_is_named(tmp_path: Path) -> None:
    (write_tiny(tmp_path) / "val" / "images" / "val_1.JPEG").write_text("no image")
    with pytest.raises(ConfigError, match=r"val_1\.JPEG cannot be decoded"):
        everything(ready(TinyImageNet(root=str(tmp_path), num_clients=2)).test_loader())
