"""A network that finds joints, without lit_fed: pictures of any size in, named joints out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lit_fed import load_network
from lit_fed.command.cli import main
from lit_fed.poses import Puppets
from tests.support import ROOT

RUN = [
    *("-c", str(ROOT / "configs" / "papers" / "raf" / "runs" / "puppets.yaml"), "--trainer.max_rounds", "1"),
    *("--trainer.local_epochs", "1", "--trainer.enable_progress_bar", "false", "--data.samples_per_client", "16"),
    *("--data.test_samples", "4", "--trainer.logger", "true"),
]


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its export, and a photograph that neither has seen: one figure of another seed on 128×96 pixels."""
    folder = tmp_path_factory.mktemp("poses")
    main(["fit", *RUN, "--trainer.default_root_dir", str(folder)])
    version = folder / "lightning_logs" / "version_0"
    assert main(["export", "--ckpt_path", str(version), "-o", str(folder / "exported")]) in (0, None)
    data = Puppets(samples_per_client=1, test_samples=1, figure_seed=99)
    data.setup()
    Image.fromarray(np.ascontiguousarray(data.stored_image("test", 0))).save(folder / "person.png")
    return folder


def test_joints_outside_are_those_that_predict_writes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # At 128×96 the photograph itself is the picture, so that both see the same pixels.
    monkeypatch.chdir(run)
    ckpt = ["--ckpt_path", str(run / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt")]
    at = ["--data.resolutions", "[[128,96],[64,48],[32,24]]", "--trainer.logger", "false", "--overwrite", "true"]
    main(["predict", *RUN, *ckpt, *at, "--inputs", "person.png", "--output", "joints.json"])
    (ours,) = json.loads((run / "joints.json").read_text())
    wanted = np.array(ours["keypoints"]).reshape(-1, 3)
    told = {"model.json": ""}
    model = torch.export.load(run / "exported" / "model.pt2", extra_files=told).module()
    picture = torch.from_numpy(np.asarray(Image.open(run / "person.png"))).permute(2, 0, 1)[None]
    with torch.no_grad():
        found = model(picture)
    np.testing.assert_allclose(found["keypoints"][0].numpy(), wanted[:, :2], atol=1e-3)
    np.testing.assert_allclose(found["score"][0].numpy(), wanted[:, 2], atol=1e-5)
    assert json.loads(told["model.json"])["joints"] == ours["joints"]
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(run / "exported" / "model.onnx")
    keypoints, _ = session.run(["keypoints", "score"], {"inputs": picture.numpy()})
    assert (np.abs(keypoints[0] - wanted[:, :2]).max(axis=1) < 1e-2).mean() > 0.9
    facts = json.loads(session.get_modelmeta().custom_metadata_map["lit_fed"])
    assert facts["joints"] == ours["joints"]
    assert [13, 12] in facts["edges"] or [12, 13] in facts["edges"]


def test_pictures_have_any_size(run: Path) -> None:
    model = torch.export.load(run / "exported" / "model.pt2").module()
    deployed = load_network(run / "lightning_logs" / "version_0")
    for size in ((32, 24), (61, 99)):
        picture = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)
        with torch.no_grad():
            torch.testing.assert_close(model(picture), deployed(picture), rtol=1e-4, atol=1e-3)
    card = (run / "exported" / "MODEL_CARD.md").read_text()
    assert "repeated to multiples of 4 pixels" in card
    assert "times 1, and shown\n  at 64×48, 48×36, 32×24 pixels" in card
    assert "Joints, in their order: right_ankle, right_knee" in card


def test_the_cards_lines_draw_a_skeleton_without_lit_fed(run: Path) -> None:
    card = (run / "exported" / "MODEL_CARD.md").read_text()
    lines = next(block for block in card.split("```") if "skeleton.png" in block).removeprefix("python\n")
    exif = Image.Exif()
    exif[274] = 6  # stored on its side
    person = Image.open(run / "person.png").rotate(90, expand=True)
    person.save(run / "exported" / "person.jpg", exif=exif)
    block = "import sys; sys.modules['lit_fed'] = None\nimport matplotlib; matplotlib.use('Agg')\n" + lines
    block += f"\nassert picture.shape == (3, {person.width}, {person.height})"
    subprocess.run([sys.executable, "-c", block], cwd=run / "exported", check=True, timeout=120)
    assert Image.open(run / "exported" / "skeleton.png").size[0] > 100
