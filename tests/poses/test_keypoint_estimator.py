"""`lit_fed.poses.KeypointEstimator`: loss and metrics by hand, the flip test, optimizers, settings, a plain trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_fed.command.cli import main
from lit_fed.errors import ConfigError
from lit_fed.poses import UDP, KeypointEstimator
from lit_fed.poses.metrics import joint_kinds
from tests.support import ROOT


class Oracle(nn.Module):
    """Heatmaps that are the image's channels: what is drawn is what is found."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.head = nn.Identity()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.scale * x)
        return found


def oracle(**kwargs: Any) -> KeypointEstimator:
    settings: dict[str, Any] = {"num_joints": 2, "flip_test": False, "optimizer": lambda p: torch.optim.SGD(p, lr=1.0)}
    return KeypointEstimator(Oracle(), **(settings | kwargs))


def drawn(keypoints: Tensor, size: tuple[int, int] = (32, 24)) -> dict[str, Tensor]:
    """Persons whose images are the heatmaps of their joints, all visible, heads of 8 pixels."""
    visible = torch.ones(keypoints.shape[:2])
    image = UDP(stride=1).encode(keypoints, visible, size)
    return {
        "image": image,
        "keypoints": keypoints.clone(),
        "visible": visible,
        "head_size": torch.full((len(keypoints),), 8.0),
    }


JOINTS = torch.tensor([[[8.3, 9.2], [15.0, 20.6]], [[11.0, 12.0], [7.5, 15.5]]])


def test_the_loss_by_hand() -> None:
    task, batch = oracle(), drawn(JOINTS)
    batch["visible"] = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    batch["image"] = torch.zeros(2, 2, 32, 24)
    targets = UDP(stride=1).encode(JOINTS, torch.ones(2, 2), (32, 24))
    # Heatmaps of zeros: each joint's mean of squares over 2 persons and 32·24 pixels, of which the invisible one's are
    # 0; then the mean over 2 joints.
    squares = targets.square().sum(dim=(2, 3))
    joints = [(squares[0, 0] + squares[1, 0]) / (2 * 32 * 24), squares[1, 1] / (2 * 32 * 24)]
    returned = task.training_step(batch, 0)
    torch.testing.assert_close(returned["loss"], (joints[0] + joints[1]) / 2)


def test_an_invisible_joint_teaches_nothing() -> None:
    task, batch = oracle(), drawn(JOINTS)
    batch["visible"][0, 1] = 0
    before = task.training_step(batch, 0)
    batch["image"][0, 1] += 7.0
    batch["keypoints"][0, 1] = math.nan
    after = task.training_step(batch, 0)
    assert torch.equal(before["loss"], after["loss"])
    assert torch.equal(before["logits"], after["logits"])
    assert not after["logits"][0, 1].any()


def test_nobody_visible_is_a_loss_of_nothing_and_no_metric(tmp_path: Path) -> None:
    batch = drawn(JOINTS)
    batch["visible"].zero_()
    assert oracle().training_step(batch, 0)["loss"] == 0
    [found] = plain(tmp_path).test(oracle(), of([batch]), verbose=False)
    assert found == {"test/loss": 0.0}


def of(batches: list[Any]) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a data set


def plain(tmp_path: Path, **settings: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("stage", ["val", "test"])
def test_metrics_by_hand_under_a_plain_trainer(tmp_path: Path, stage: str) -> None:
    first, second = drawn(JOINTS[:1]), drawn(JOINTS[1:])
    # Heads of 8 pixels: found within 4, strictly within 2. One of four joints is said to be 3 away, one 5.
    first["keypoints"] = JOINTS[:1] + torch.tensor([[[3.0, 0.0], [0.0, 0.0]]])
    second["keypoints"] = JOINTS[1:] + torch.tensor([[[0.0, 0.0], [3.0, 4.0]]])
    run, task = plain(tmp_path), oracle()
    for _ in range(2):  # nothing is left of a pass for the next
        evaluate = run.validate if stage == "val" else run.test
        [found] = evaluate(task, of([first, second]), verbose=False)
        assert {name: value for name, value in found.items() if "loss" not in name} == {
            f"{stage}/pck": 75.0,
            f"{stage}/pck_strict": 50.0,
        }


def test_joints_that_do_not_count() -> None:
    batch = drawn(JOINTS)
    batch["keypoints"] = JOINTS + torch.tensor([[0.0, 0.0], [9.0, 9.0]])
    task = oracle(unscored_joints=[1])
    task.log = lambda *args, **kwargs: None  # type: ignore[assignment, method-assign]  # there is no trainer
    task.test_step(batch, 0)
    assert (task.pck.correct, task.pck.total) == (2, 2)


class Leftmost(Oracle):
    """Takes the spot further to the left for joint 0, in whichever channel it is drawn: a hand of somebody in front."""

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum(dim=2).argmax(dim=2).argsort(dim=1)
        return x.gather(1, order[:, :, None, None].expand_as(x))


def test_the_flip_test_is_the_mean_with_the_mirror_image() -> None:
    batch = drawn(torch.tensor([[[8.0, 9.0], [15.0, 20.0]], [[3.0, 30.0], [22.0, 4.0]]]))
    task = oracle(flip_test=True, flip_pairs=[(0, 1)])
    task.network = Leftmost()
    torch.testing.assert_close(task.heatmaps(batch["image"]), batch["image"])
    # Without its pairs joints 0 and 1 are each drawn twice, half as high.
    unpaired = oracle(flip_test=True, flip_pairs=[])
    unpaired.network = task.network
    torch.testing.assert_close(
        unpaired.heatmaps(batch["image"]), batch["image"].mean(dim=1, keepdim=True).expand(2, 2, 32, 24)
    )


def test_predictions_are_points_and_scores() -> None:
    batch = drawn(JOINTS)
    for form in (batch, batch["image"], (batch["image"], torch.arange(2))):
        found = oracle().predict_step(form, 0)
        torch.testing.assert_close(found["keypoints"], JOINTS, rtol=0, atol=0.01)
        assert found["score"].shape == (2, 2)


def test_a_rate_for_each_layer() -> None:
    def made(layer_decay: float | None) -> KeypointEstimator:
        return KeypointEstimator(
            "pose_vit_tiny", lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), num_joints=2, flip_test=False,
            network_args={"depth": 2}, layer_decay=layer_decay, input_shape=(3, 16, 12),
        )  # fmt: skip

    task = made(0.75)
    optimizer = task.configure_optimizers()
    network: Any = task.network
    settings = {
        id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }
    assert settings.keys() == {id(parameter) for parameter in task.parameters()}
    # The stem, two blocks, the rest: .75³, .75², .75 and 1 of the rate; vectors and what tells places do not decay.
    assert settings[id(network.patch_embed.weight)] == (pytest.approx(0.01 * 0.421875), 0.1)
    assert settings[id(network.gpe.conv.weight)] == (pytest.approx(0.01 * 0.421875), 0.0)
    assert settings[id(network.blocks[0].attn.qkv.weight)] == (pytest.approx(0.01 * 0.5625), 0.1)
    assert settings[id(network.blocks[1].attn.lpe.weight)] == (pytest.approx(0.01 * 0.75), 0.0)
    assert settings[id(network.head[0].weight)] == (0.01, 0.1)
    assert settings[id(network.head[0].bias)] == (0.01, 0.0)
    [group] = made(None).configure_optimizers().param_groups
    assert (group["lr"], group["weight_decay"]) == (0.01, 0.1)


def test_it_learns_under_a_plain_trainer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = KeypointEstimator(
        "pose_cnn", lambda p: torch.optim.AdamW(p, lr=3e-3), num_joints=2, in_channels=2, input_shape=(2, 32, 24),
        flip_test=False, network_args={"width": 16, "depth": 1},
    )  # fmt: skip
    points = torch.stack([torch.rand(64, 2) * 23, torch.rand(64, 2) * 31], dim=2)
    batches = of([drawn(points[start : start + 8]) for start in range(0, 64, 8)])
    [before] = plain(tmp_path).test(task, batches, verbose=False)
    plain(tmp_path, max_epochs=6).fit(task, batches)
    [after] = plain(tmp_path).test(task, batches, verbose=False)
    assert before["test/pck"] < 50 < 90 < after["test/pck"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"flip_test": True}, "needs model.flip_pairs, the joints that swap in a mirror; give them, or set"),
        (
            {"flip_test": True, "flip_pairs": [[0, 2]]},
            r"flip_pairs has \[0, 2\]; it must have pairs of the joints 0 … 1",
        ),
        ({"flip_pairs": [[0, -1]]}, r"flip_pairs has \[0, -1\]; it must have pairs of the joints 0 … 1"),
        ({"flip_pairs": [[0]]}, r"flip_pairs has \[0\]; it must have pairs of the joints 0 … 1"),
        ({"codec": UDP()}, "model.codec has stride 4, and network Oracle has stride 1; set the codec's"),
        ({"layer_decay": 0.75}, "layer_decay is 0.75; it must be .* the network must have a group_matcher"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        oracle(**settings)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model.init_args.num_joints", "16"], "model.num_joints is 16, but the data have 14 joints"),
        (
            ["--model.init_args.flip_pairs", "[[0, 14]]"],
            "model.flip_pairs has [0, 14]; it must have pairs of the joints 0 … 13",
        ),
        (["--data.init_args.resolutions", "[[62, 48]]"], "an image of 62×48 pixels cannot be cut into patches of 4"),
        (["--data.init_args.resolutions", "[[3, 2]]"], "an image of 3×2 pixels is smaller than a patch of 4"),
        (["--data.init_args.resolutions", "[[64, 48], [50, 38]]"], "an image of 50×38 pixels cannot be cut into"),
        (["--data.init_args.test_resolutions", "[[50, 38]]"], "an image of 50×38 pixels cannot be cut into patches"),
        (["--data.init_args.test_resolutions", "[[3, 2]]"], "an image of 3×2 pixels is smaller than a patch of 4"),
        (
            ["--model.init_args.skeleton_edges", "[[0, 14]]"],
            "model.skeleton_edges has [0, 14]; it must have pairs of the",
        ),
    ],
)
def test_the_command_line_says_what_does_not_fit(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = ["--data.init_args.samples_per_client", "4", "--trainer.default_root_dir", str(tmp_path)]
    few += ["--data.init_args.clients_per_level", "null", "--data.init_args.num_clients", "1"]
    files = [ROOT / "configs" / name for name in ("papers/raf/runs/puppets.yaml", "network/pose_vit_tiny.yaml")]
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *(word for path in files for word in ("-c", str(path))), *few, *options])
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("lit-fed: error: ")
    assert words in line
    assert not any(tmp_path.rglob("metrics.csv")), "it is said before any training"


def test_images_without_heatmaps_are_refused() -> None:
    task = KeypointEstimator(Oracle(4), num_joints=2, flip_test=False)
    task.check_shape((3, 12, 16))
    with pytest.raises(ConfigError, match="an image has 8×16 pixels; for heatmaps of stride 4 both sides must be"):
        task.check_shape((3, 8, 16))


def test_another_number_of_joints_is_refused() -> None:
    batch = drawn(torch.cat((JOINTS, JOINTS[:, :1]), dim=1))
    batch["image"] = batch["image"][:, :2]
    with pytest.raises(ConfigError, match=r"gives heatmaps \(2, 2, 32, 24\), and the batch needs \(2, 3, 32, 24\)"):
        oracle().training_step(batch, 0)


def test_joints_by_their_kind_and_within_a_tenth_by_hand() -> None:
    # Lengths are 10, and joints are off by 6, 2 and .5: of two ankles one is within .5, of three joints one within .1.
    assert joint_kinds(["left_ankle", "Right ankle", "head_top", "L-Wrist"]) == {
        "ankle": [0, 1], "head_top": [2], "wrist": [3]
    }  # fmt: skip
    names = ["left_ankle", "right_ankle", "head_top", "pelvis"]
    task = KeypointEstimator(nn.Identity(), num_joints=4, flip_test=False, joint_names=names, per_joint=True,
                             unscored_joints=[3])  # fmt: skip
    assert list(task.of_joints) == ["pck_fine", "pck_ankle", "pck_head_top", "pck_fine_ankle", "pck_fine_head_top"]
    assert set(task.of_joints) < set(task.metrics) == {*task.ranges, "loss"}
    truth, off = torch.zeros(1, 4, 2), torch.tensor([[[0.0, 6.0], [2.0, 0.0], [0.0, 0.5], [9.0, 9.0]]])
    for metric in task.of_joints.values():
        metric.update(truth + off, truth, torch.ones(1, 4), torch.tensor([10.0]))
    found = {name: round(float(metric.compute()), 3) for name, metric in task.of_joints.items()}
    assert found == {
        "pck_fine": 33.333,
        "pck_ankle": 50,
        "pck_head_top": 100,
        "pck_fine_ankle": 0,
        "pck_fine_head_top": 100,
    }
    with pytest.raises(ConfigError, match=r"model.per_joint needs model.joint_names"):
        KeypointEstimator(nn.Identity(), num_joints=4, flip_test=False, per_joint=True)
    with pytest.raises(ConfigError, match=r"model.joint_names has 1 names for 4 joints"):
        KeypointEstimator(nn.Identity(), num_joints=4, flip_test=False, joint_names=["a"])


def test_average_precision_is_declared_where_areas_are_known() -> None:
    task = KeypointEstimator(nn.Identity(), num_joints=17, flip_test=False, coco_ap=True)
    assert list(task.metrics) == ["pck", "pck_strict", "ap", "ap50", "ap75", "ar", "loss"]
    assert "ap" not in KeypointEstimator(nn.Identity(), num_joints=17, flip_test=False).metrics
