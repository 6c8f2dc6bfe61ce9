"""Real photographs, where they lie: in data/ at the root of the repository, or where LIT_FED_DATA says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lit_fed.command.cli import main
from lit_fed.poses import CocoKeypoints, Mpii
from lit_fed.poses.data import LSP
from tests.support import ROOT, rows

DATA = Path(os.environ.get("LIT_FED_DATA", ROOT / "data"))
LSPET, SAMPLE = DATA / "lspet", DATA / "mpii" / "sample.json"
needs_lspet = pytest.mark.skipif(not LSPET.is_dir(), reason="needs Leeds Sports Pose Extended in data/lspet")
needs_mpii = pytest.mark.skipif(not SAMPLE.is_file(), reason="needs five persons of MPII in data/mpii/sample.json")


@needs_lspet
def test_leeds_sports_pose_is_read_with_the_joints_of_drawn_figures() -> None:
    data = CocoKeypoints(
        root=str(LSPET), train_file="train.json", test_file="test.json", train_images="images", test_images="images",
        resolutions=[(128, 96), (96, 72), (64, 48)], samples_per_client=333, batch_size=8, test_batch_size=200,
    )  # fmt: skip
    data.setup()
    assert (data.joint_names, data.flip_pairs) == (LSP.joints, LSP.flip_pairs)
    # 1,000 persons to train on and 200 to test on, as its readme says.
    assert [data.census.num_samples(client) for client in range(3)] == [333] * 3
    batch = next(iter(data.train_loader(0, torch.Generator())))
    assert [tuple(one["image"].shape) for one in (batch, *batch["levels"])] == [
        (8, 3, 128, 96),
        (8, 3, 96, 72),
        (8, 3, 64, 48),
    ]
    batch = next(iter(data.test_loader()))
    assert batch["image"].shape == (200, 3, 128, 96)
    inside = ((batch["keypoints"] >= -0.5) & (batch["keypoints"] < torch.tensor([95.5, 127.5]))).all(dim=2)
    seen = batch["visible"] > 0
    assert (inside & seen).sum() / seen.sum() > 0.99, "boxes are around the joints, and enlarged"
    assert batch["head_size"].nan_to_num(1.0).min() > 0


@needs_lspet
def test_the_run_on_leeds_sports_pose_takes_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {
        "data.init_args.root": LSPET,
        "data.init_args.samples_per_client": 8,
        "data.init_args.max_test_samples": 20,
        "model.init_args.network_args.weights": "null",
        "trainer.max_rounds": 1,
        "trainer.logger": "false",
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": tmp_path,
    }
    run = ROOT / "configs" / "papers" / "raf" / "runs" / "lspet.yaml"
    main(["fit", "-c", str(run), *(word for key, value in changes.items() for word in (f"--{key}", str(value)))])
    assert capsys.readouterr().err == ""
    (row,) = rows(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
    for size in ("64x48", "96x72", "128x96", "160x120", "192x144", "256x192"):
        assert 0 <= float(row[f"global/pck_{size}"]) <= 100


@needs_mpii
def test_persons_of_mpii_are_where_their_boxes_are() -> None:
    data = Mpii(root=str(SAMPLE.parent), train_file="sample.json", test_file="sample.json", num_clients=1)
    data.setup()
    batch = next(iter(data.test_loader()))
    assert batch["image"].shape == (5, 3, 256, 192)
    assert batch["image"].std() > 0.5, "photographs, normalised, and not black"
    inside = ((batch["keypoints"] >= -0.5) & (batch["keypoints"] < torch.tensor([191.5, 255.5]))).all(dim=2)
    assert (inside | (batch["visible"] == 0)).float().mean() > 0.95
    # PCKh's length is 25·scale of a box that is 250·scale high: a tenth of the picture's 256 pixels.
    torch.testing.assert_close(batch["head_size"], torch.full((5,), 25.6))
