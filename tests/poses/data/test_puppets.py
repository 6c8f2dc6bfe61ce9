"""The drawn figures: what is in a batch, who sees what, and what it follows from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed.data import Batches, Dirichlet, Natural
from lit_fed.errors import ConfigError
from lit_fed.poses import PoseAugmentation, Puppets
from lit_fed.poses.data.puppets import HEIGHT, WIDTH, drawn, figure_picture
from tests.poses.data.support import STILL, generator, same
from tests.support import fit, weights

MIRROR = PoseAugmentation(scale=0.0, rotation=0.0, flip=1.0, shift=0.0, half_body=0.0)


def puppets(clients: Any = None, **kwargs: Any) -> Puppets:
    data = Puppets(**({"samples_per_client": 10, "test_samples": 7, "batch_size": 4} | kwargs))
    data.reserve(public_size=4)
    data.setup(clients=clients)
    return data


# ---------------------------------------------------------------------- the figures


def test_a_figure_follows_from_its_seed_and_number():
    pictures, joints = drawn(3, "train", 6)
    assert pictures.shape == (6, 3, HEIGHT, WIDTH)
    assert joints.shape == (6, 14, 2)
    picture, one = figure_picture(3, "train", 4)
    np.testing.assert_array_equal(pictures[4], picture)
    np.testing.assert_array_equal(joints[4], one)
    assert (
        len({row.tobytes() for row in np.concatenate([pictures, drawn(3, "test", 6)[0], drawn(4, "train", 6)[0]])})
        == 18
    )


def test_figures_are_of_the_sizes_that_are_told():
    joints = drawn(0, "train", 400)[1].astype(np.float64)
    hips, neck, head_top = (joints[:, 2] + joints[:, 3]) / 2, joints[:, 12], joints[:, 13]
    torso = np.linalg.norm(neck - hips, axis=1)
    assert 26 <= torso.min() < 27
    assert 35 < torso.max() <= 36
    tilt = np.arctan2((neck - hips)[:, 0], -(neck - hips)[:, 1])
    assert tilt.std() == pytest.approx(0.2, abs=0.02)  # of 400: ± .2/√800 = .007
    head = np.linalg.norm(head_top - neck, axis=1) / torso
    assert 0.42 <= head.min() < head.max() <= 0.5401
    for start, end in ((2, 1), (1, 0), (3, 4), (4, 5), (8, 7), (7, 6), (9, 10), (10, 11)):
        limb = np.linalg.norm(joints[:, start] - joints[:, end], axis=1) / torso
        assert 0.4999 <= limb.min() < limb.max() <= 0.7501
    assert ((joints >= 0) & (joints <= [WIDTH - 1, HEIGHT - 1])).all(2).mean() > 0.99
    # Half of them are seen from behind: right shoulders on the picture's right.
    assert (joints[:, 8, 0] > joints[:, 9, 0]).mean() == pytest.approx(0.5, abs=0.1)


def test_low_resolutions_lose_what_tells_hands_from_their_surroundings():
    # A hand is drawn in one colour on 2 to 3 pixels each way; how much its place stands out from a ring around it.
    pictures, joints = drawn(0, "train", 200)
    data = puppets(samples_per_client=67, test_resolutions=[(128, 96), (64, 48), (32, 24), (16, 12)])
    contrast = {}
    for name, view in data.views().items():
        loader = data.make_loader(Batches("train", np.arange(200), 200))
        seen = view(next(iter(loader)))
        zoom = HEIGHT / seen["image"].shape[2]
        wrist = seen["keypoints"][:, 6].numpy()
        grid = torch.nn.functional.interpolate(seen["image"], (HEIGHT, WIDTH), mode="bilinear").numpy()
        at = np.clip(np.round((wrist + 0.5) * zoom - 0.5).astype(int), 8, [WIDTH - 9, HEIGHT - 9])
        ring = [(dx, dy) for dx in (-8, 0, 8) for dy in (-8, 0, 8) if dx or dy]
        own = np.stack([grid[i, :, y, x] for i, (x, y) in enumerate(at)])
        around = np.stack([[grid[i, :, y + dy, x + dx] for dx, dy in ring] for i, (x, y) in enumerate(at)])
        contrast[name] = float(np.abs(own[:, None] - around).mean())
    assert contrast["128x96"] > contrast["64x48"] > contrast["32x24"] > 1.5 * contrast["16x12"]
    assert len(pictures) == len(joints) == 200


# ---------------------------------------------------------------------- batches


def test_every_client_sees_its_own_resolution_and_all_below():
    data = puppets(num_clients=3)
    for client_id, sizes in enumerate(([(64, 48), (48, 36), (32, 24)], [(48, 36), (32, 24)], [(32, 24)])):
        batch = next(iter(data.train_loader(client_id, generator())))
        levels = [batch, *batch["levels"]]
        assert [tuple(level["image"].shape) for level in levels] == [(4, 3, *size) for size in sizes]
        for level in levels:
            assert {"image", "keypoints", "visible", "head_size"} <= set(level)
            assert level["keypoints"].shape == (4, 14, 2)
            assert level["visible"].shape == (4, 14)
            assert level["head_size"].shape == (4,)
        tested = next(iter(data.test_loader(client_id)))
        assert tuple(tested["image"].shape[2:]) == sizes[0]
        assert tested["levels"] == []
    assert tuple(next(iter(data.test_loader()))["image"].shape[2:]) == (64, 48)


def test_pixels_are_means_and_points_lie_on_them():
    data = puppets(num_clients=1, augmentation=STILL, resolutions=[(64, 48), (32, 24)])
    pictures, joints = drawn(0, "train", 10)
    loader = data.make_loader(Batches("train", np.arange(10), 10))
    seen = data.view(0)(next(iter(loader)))
    means = pictures.reshape(10, 3, 64, 2, 48, 2).astype(np.float64).mean((3, 5)) / 255
    np.testing.assert_allclose(seen["image"], (means - 0.5) / 0.25, atol=1e-5)
    np.testing.assert_allclose(seen["keypoints"], (joints + 0.5) / 2 - 0.5, atol=1e-4)
    # from neck to head top, at half the size
    np.testing.assert_allclose(seen["head_size"], np.linalg.norm(joints[:, 12] - joints[:, 13], axis=1) / 2, rtol=1e-5)


def test_joints_off_the_canvas_are_not_visible():
    data = puppets(num_clients=1, samples_per_client=300, batch_size=300)
    joints = drawn(0, "train", 300)[1]
    off = ((joints < -0.5) | (joints >= [WIDTH - 0.5, HEIGHT - 0.5])).any(2)
    assert off.any()
    truth = next(iter(data.make_loader(Batches("train", np.arange(300), 300))))[1]
    np.testing.assert_array_equal(truth["visible"].numpy(), ~off)


def test_a_mirrored_batch_has_left_and_right_changed():
    plain, mirrored = (
        next(iter(puppets(num_clients=1, augmentation=augmentation).train_loader(0, generator())))
        for augmentation in (STILL, MIRROR)
    )
    order = list(Puppets.skeleton.flip_order)
    assert order == [5, 4, 3, 2, 1, 0, 11, 10, 9, 8, 7, 6, 12, 13]
    for level, other in zip((plain, *plain["levels"]), (mirrored, *mirrored["levels"]), strict=True):
        width = level["image"].shape[3]
        torch.testing.assert_close(other["image"], level["image"].flip(3), rtol=0, atol=1e-4)
        expected = torch.stack([width - 1 - level["keypoints"][..., 0], level["keypoints"][..., 1]], dim=2)[:, order]
        torch.testing.assert_close(other["keypoints"], expected, rtol=0, atol=1e-4)
        assert torch.equal(other["visible"], level["visible"][:, order])


def test_batches_follow_from_seed_and_client_and_nothing_else():
    data = puppets(augmentation=PoseAugmentation())
    first = [list(data.train_loader(client_id, generator(client_id))) for client_id in range(3)]
    torch.manual_seed(99)
    again = [list(data.train_loader(client_id, generator(client_id))) for client_id in (2, 1, 0)][::-1]
    assert all(same(one, other) for one, other in zip(first, again, strict=True))
    assert not same(first[0], list(data.train_loader(0, generator(7))))
    loader = data.train_loader(0, generator(0))
    assert not same(list(loader), list(loader))  # every epoch draws anew
    alone = puppets(clients=[1], augmentation=PoseAugmentation())
    assert same(alone.train_loader(1, generator(1)), first[1])
    assert same(alone.test_loader(1), data.test_loader(1))
    assert same(alone.public_loader(client_id=1), data.public_loader(client_id=1))
    assert alone.census.fingerprint(1) == data.census.fingerprint(1)
    assert alone.record.sha256 == data.record.sha256


def test_the_last_batch_may_be_left_out():
    for drop_last, sizes in ((False, [4, 4, 1]), (True, [4, 4])):
        loader = puppets(num_clients=1, val_fraction=0.0, samples_per_client=13, drop_last=drop_last)
        found = [len(batch["image"]) for batch in loader.train_loader(0, generator())]
        assert found == sizes  # 13 − 4 public ones
        assert len(loader.train_loader(0, generator())) == len(sizes)


def test_validation_public_and_pooled_sets():
    data = puppets(samples_per_client=20, val_fraction=0.25)
    batch = next(iter(data.val_loader(1)))
    assert tuple(batch["image"].shape[1:]) == (3, 48, 36)
    assert batch["levels"] == []
    image, positions = next(iter(data.public_loader(client_id=2)))
    assert (tuple(image.shape), positions.tolist()) == ((4, 3, 32, 24), [0, 1, 2, 3])
    assert next(iter(data.public_loader()))[0].shape == (4, 3, 64, 48)
    pooled = next(iter(data.train_dataloader()))
    assert [tuple(level["image"].shape[2:]) for level in (pooled, *pooled["levels"])] == [(64, 48), (48, 36), (32, 24)]
    assert next(iter(data.val_dataloader()))["image"].shape[2:] == (64, 48)


# ---------------------------------------------------------------------- evaluations


def test_an_evaluation_asks_for_any_resolution_by_its_name():
    data = puppets(test_resolutions=[(32, 24), (80, 60)], interpolations=["bilinear", "bicubic"], val_fraction=0.2)
    names = ["32x24", "80x60", "32x24_as_80x60_bilinear", "32x24_as_80x60_bicubic"]
    assert list(data.views()) == names
    shapes = [tuple(next(iter(data.test_loader(view=name)))["image"].shape[2:]) for name in names]
    assert shapes == [(32, 24), (80, 60), (80, 60), (80, 60)]
    assert tuple(next(iter(data.val_loader(0, view="80x60")))["image"].shape[2:]) == (80, 60)
    small, native, shown = (next(iter(data.test_loader(view=name))) for name in names[:3])
    enlarged = torch.nn.functional.interpolate(small["image"], (80, 60), mode="bilinear")
    assert torch.equal(shown["image"], enlarged)
    torch.testing.assert_close(shown["keypoints"], native["keypoints"])
    with pytest.raises(ConfigError, match="Puppets has no view named '64x48'; it has 32x24, 80x60"):
        data.test_loader(view="64x48")


# ---------------------------------------------------------------------- the population


def test_what_is_drawn_beside_each_other_and_how_large_it_is():
    data = Puppets(test_resolutions=[(32, 24), (64, 48), (80, 60)], interpolations=["area", "bicubic"])
    assert data.pictured() == {
        "resolutions": ["32x24", "64x48", "80x60"],
        "interpolated": ["32x24", "32x24_as_64x48_area", "32x24_as_64x48_bicubic"],
    }
    assert data.input_shapes == ((3, 64, 48), (3, 48, 36), (3, 32, 24), (3, 80, 60))
    assert Puppets().pictured() == {"resolutions": ["64x48", "48x36", "32x24"]}
    # Nothing of the lowest level is scaled to the highest where that is not tested at, or it is not tested itself.
    for sizes in ([(32, 24), (80, 60)], [(64, 48)]):
        assert list(Puppets(test_resolutions=sizes, interpolations=["area"]).pictured()) == ["resolutions"]


def test_clients_are_spread_over_levels_or_counted():
    assert [puppets(num_clients=5).level(client_id) for client_id in range(5)] == [0, 0, 1, 1, 2]
    one_high = puppets(clients_per_level=[1, 0, 4])
    assert one_high.num_clients == 5
    assert [one_high.level(client_id) for client_id in range(5)] == [0, 2, 2, 2, 2]
    assert [puppets(num_clients=2).level(client_id) for client_id in range(2)] == [0, 1]
    assert [one_high.census.num_samples(client_id) for client_id in range(5)] == [10, 9, 9, 9, 9]  # 50 − 4 public ones


def test_what_a_run_writes_down():
    data = puppets(clients_per_level=[1, 1, 1])
    row = data.describe(2)
    assert row["resolution"] == [32, 24]
    assert row["samples"] == len(row["indices"]) == data.census.num_samples(2)
    assert "histogram" not in row
    assert data.num_classes is None
    assert (data.input_shape, data.output_shape, data.num_joints) == ((3, 64, 48), (14, 2), 14)
    assert data.joint_names[13] == "head_top"
    assert data.record.picture().shape[2] == 3
    figure = data.figure()
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["64x48", "48x36", "32x24"]
    assert [patch.get_height() for patch in figure.axes[0].patches] == [data.census.num_samples(i) for i in range(3)]
    with pytest.raises(ConfigError, match="Puppets has no classes"):
        data.census.class_histogram()


def test_a_hundred_thousand_clients_cost_no_object_each():
    data = Puppets(clients_per_level=[1, 0, 99_999], samples_per_client=1, test_samples=1)
    assert [data.level(client_id) for client_id in (0, 1, 99_999)] == [0, 2, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"resolutions": [(32, 24), (64, 48)]},
            r"data.resolutions has \[64, 48\] after \[32, 24\]; give the highest first",
        ),
        ({"resolutions": []}, "data.resolutions is empty; give at least one"),
        ({"resolutions": [(0, 24)]}, r"data.resolutions has \[0, 24\]; it must be \[height, width\]"),
        ({"clients_per_level": [1, 2]}, r"data.clients_per_level is \[1, 2\]; it must be one number for each of the 3"),
        ({"clients_per_level": [0, 0, 0]}, r"data.clients_per_level is \[0, 0, 0\]; .* with a sum of at least 1"),
        (
            {"clients_per_level": [1, 1, 1], "num_clients": 4},
            "data.num_clients is 4, and data.clients_per_level has 3; leave out one of them",
        ),
        ({"num_clients": 0}, "data.num_clients is 0; it must be at least 1"),
        ({"samples_per_client": 0}, "data.samples_per_client is 0; it must be at least 1"),
        ({"max_train_samples": 5}, "data.samples_per_client and data.max_train_samples exclude each other"),
        ({"test_samples": 0}, "data.test_samples is 0; it must be at least 1"),
        ({"test_resolutions": [(1, 0)]}, r"data.test_resolutions has \[1, 0\]"),
        (
            {"interpolations": ["cubic"]},
            r"data.interpolations\[0\] is 'cubic'; it must be 'bilinear', 'area' or 'bicubic'",
        ),
        ({"partition": Natural()}, "data.partition is Natural, and Puppets does not name clients; choose IID"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Puppets(**settings)


def test_what_cannot_be_shown_or_cut():
    data = puppets(resolutions=[(64, 64), (32, 24)], interpolations=["area"], num_clients=2)
    with pytest.raises(
        ConfigError, match="pictures of 32x24 cannot be shown as 64x64; choose a resolution of the same"
    ):
        data.views()
    with pytest.raises(ConfigError, match="strata"):
        puppets(partition=Dirichlet(0.5))


# ---------------------------------------------------------------------- in use


class Finder(LightningModule):
    """Says where joints are, in parts of the picture's size, from a convolution's mean over the picture.

    Where it says 0 for all the error is about .3, and .02 where it knows the mean pose.
    """

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 28)
        )

    def error(self, batch: dict[str, Any]) -> Tensor:
        height, width = batch["image"].shape[2:]
        found = self.network(batch["image"]).view(-1, 14, 2)
        wrong = (found - batch["keypoints"] / batch["keypoints"].new_tensor([width, height])) ** 2
        return (wrong * batch["visible"].unsqueeze(2)).mean()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return torch.stack([self.error(level) for level in (batch, *batch["levels"])]).mean()

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("test/error", self.error(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.02)


def test_the_round_loop_trains_on_it_and_tests_every_client(tmp_path: Path):
    lightning.seed_everything(0, verbose=False)
    module = Finder()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    made = fit(tmp_path, module, Puppets(samples_per_client=8, test_samples=6, batch_size=4), max_rounds=8)
    after = weights(made)
    assert any(not torch.equal(after[name], before[name]) for name in after)
    assert made.metrics["global/error"] < 0.1


def test_a_plain_trainer_takes_it(tmp_path: Path):
    lightning.seed_everything(0, verbose=False)
    plain = lightning.Trainer(
        max_epochs=8,
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Puppets(samples_per_client=8, test_samples=6, batch_size=4)
    module = Finder()
    plain.fit(module, data)
    assert plain.test(module, data, verbose=False)[0]["test/error"] < 0.1


def test_fresh_batches_are_equally_large_and_never_hold_a_figure_twice() -> None:
    data = Puppets(samples_per_client=5, test_samples=1, batch_size=2, fresh_batches=True)
    data.setup()
    loader = data.train_loader(2, generator(0))
    batches = [batch["keypoints"] for batch in loader]
    assert [len(batch) for batch in batches] == [2, 2, 2]  # ⌈5 / 2⌉ full batches, where one shuffle has 2, 2 and 1
    assert loader.num_samples == 6
    assert all(not torch.equal(batch[0], batch[1]) for batch in batches)
