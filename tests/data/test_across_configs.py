"""Every configuration of a data set parses, and those that need no files give batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from lit_fed.data import (
    Diabetes,
    Digits,
    Dirichlet,
    FederatedDataModule,
    Natural,
    NoiseLevels,
    Quantity,
    Shards,
    SizeLaw,
)
from lit_fed.poses import PoseDataModule, Puppets

FOLDER = Path(__file__).parents[2] / "configs" / "data"
CONFIGS = sorted(FOLDER.glob("*.yaml"))


def parser() -> ArgumentParser:
    result = ArgumentParser(exit_on_error=False)
    result.add_argument("--config", action="config")
    result.add_subclass_arguments(FederatedDataModule, "data")
    return result


def parse(*arguments: str) -> Any:
    reader = parser()
    instantiate = getattr(reader, "instantiate", None) or reader.instantiate_classes  # its name before 4.49
    return instantiate(reader.parse_args(list(arguments))).data


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_parses_and_says_what_it_is(path):
    data = parse("--config", str(path))
    assert isinstance(data, FederatedDataModule)
    assert path.read_text(encoding="utf-8").startswith("# ")
    if data.root != "data" and "data/" not in data.root:
        pytest.fail("a configuration reads below data/, so that --data.init_args.root is all that must be given")
    resolved = parser().dump(parser().parse_args(["--config", str(path)]))
    again = parser().parse_string(resolved)
    assert parser().dump(again) == resolved
    if isinstance(data, Digits | Diabetes):
        data.setup()
        x, y = next(iter(data.train_loader(0, torch.Generator())))
        assert x.shape[1:] == data.input_shape
        assert y.dtype == (torch.int64 if data.num_classes else torch.float32)
        assert data.test_loader(0).num_samples > 0


def test_pose_configurations_say_who_sees_what():
    for name, lowest, evaluations in (
        ("puppets", (32, 24), 4 + 3 * 3),
        ("lspet", (64, 48), 4 + 3 * 3),
        ("mpii", (128, 96), 6 + 3 * 5),
        ("coco_keypoints", (128, 96), 5),
    ):
        data = parse("--config", str(FOLDER / f"{name}.yaml"))
        assert isinstance(data, PoseDataModule)
        assert (data.num_clients, data.clients_per_level) == (3, [1, 1, 1])
        assert data.resolutions[-1] == lowest
        if isinstance(data, Puppets):  # the others have joints, or boxes, in files only
            data.setup()
            assert len(data.views()) == evaluations
            batch = next(iter(data.train_loader(0, torch.Generator())))
            assert batch["image"].shape == (8, *data.input_shape)
        larger = [size for size in data.test_resolutions if size > lowest]
        assert len(data.test_resolutions) + len(data.interpolations) * len(larger) == evaluations
    flips = parse("--config", str(FOLDER / "puppets.yaml"), "--data.augmentation.scale", "0.25")
    assert isinstance(flips, PoseDataModule)
    assert flips.augmentation.scale == 0.25


def test_there_is_a_configuration_for_each_data_set():
    assert len(CONFIGS) == 32


def test_short_names_and_single_settings():
    data = parse(
        "--data", "Digits", "--data.num_clients", "4", "--data.partition", "Dirichlet", "--data.partition.alpha", "2"
    )
    assert isinstance(data.partition, Dirichlet)
    assert (data.num_clients, data.partition.alpha) == (4, 2.0)
    for partition, cls in (("Shards", Shards), ("Quantity", Quantity), ("Natural", Natural)):
        assert isinstance(parse("--data", "Digits", "--data.partition", partition).partition, cls)
    inner = ("--data", "Digits", "--data.partition", "InnerDirichlet", "--data.partition.sizes")
    assert parse(*inner, "[30, 20, 10]").num_clients == 3
    assert isinstance(parse(*inner, "SizeLaw", "--data.partition.sizes.law", "square").partition.sizes, SizeLaw)
    data = parse("--data", "Digits", "--data.skew", "NoiseLevels", "--data.skew.sigma", "2")
    assert isinstance(data.skew, NoiseLevels)
    assert data.skew.sigma == 2
    listed = ("--data", "Digits", "--data.partition", "Listed", "--data.partition.clients")
    assert parse(*listed, "[[0, 1], [2], [7]]").num_clients == 3


@pytest.mark.parametrize("option", ["--data.num_client", "--data.partition.alfa", "--data.public_size"])
def test_unknown_settings_fail(option):
    with pytest.raises(Exception, match=r"alfa|num_client|public_size"):
        parse("--data", "Digits", "--data.partition", "Dirichlet", option, "4")


def test_what_the_model_is_built_from_is_known_before_the_data_are_read():
    data = parse("--config", str(FOLDER / "cifar100_lda.yaml"))
    assert (data.num_classes, data.in_channels, data.image_size, data.num_clients) == (100, 3, 32, 100)
