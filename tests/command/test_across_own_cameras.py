"""From sixteen photographs to named joints on a new one, by the commands of docs/poses.md alone."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lit_fed.command.cli import main
from lit_fed.poses.data.people import LSP
from lit_fed.poses.data.puppets import figure_picture
from tests.support import ROOT, rows

AREA = 8  # boxes a person: generous, so that one round's joints score between none and all
SHORT = ["--trainer.max_rounds", "1", "--trainer.local_epochs", "1", "--trainer.enable_progress_bar", "false"]


def photograph(path: Path, seed: int, zoom: float) -> dict[str, Any]:
    """A drawn figure, somewhere on a photograph of another size; its annotation, without image and number."""
    picture, joints = figure_picture(7, "cameras", seed)
    height, width = round(128 * zoom), round(96 * zoom)
    left, top = 10 + 3 * seed % 17, 5 + 2 * seed % 11
    ground = np.random.default_rng(seed).integers(60, 120, (height + 40, width + 60, 3), dtype=np.uint8)
    figure = Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0))).resize((width, height))
    ground[top : top + height, left : left + width] = np.asarray(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(ground).save(path)
    points = (joints + 0.5) * [width / 96, height / 128] - 0.5 + [left, top]
    low, high = points.min(0), points.max(0)
    return {
        "category_id": 1, "iscrowd": 0, "num_keypoints": 14, "area": float(np.prod(high - low)) * AREA,
        "keypoints": np.concatenate([points, np.full((14, 1), 2)], 1).ravel().tolist(),
        "bbox": [*low.tolist(), *(high - low).tolist()],
        "head_size": float(np.linalg.norm(points[12] - points[13])),
    }  # fmt: skip


def annotated(folder: Path, part: str, seeds: range, zoom: float) -> None:
    persons = [photograph(folder / "images" / f"{seed}.png", seed, zoom) for seed in seeds]
    content = {
        "images": [{"id": seed, "file_name": f"{seed}.png"} for seed in seeds],
        "annotations": [one | {"id": seed, "image_id": seed} for seed, one in zip(seeds, persons, strict=True)],
        "categories": [{
            "id": 1, "name": "person", "keypoints": list(LSP.joints),
            "skeleton": [[one + 1, other + 1] for one, other in LSP.edges],
        }],
    }  # fmt: skip
    (folder / f"{part}.json").write_text(json.dumps(content))


def commands() -> list[list[str]]:
    """The commands of the section, without lit-fed."""
    section = (ROOT / "docs" / "poses.md").read_text().partition("## Your own cameras")[2].partition("\n## ")[0]
    block = re.search(r"```bash\n(.*?)```", section, re.S)
    assert block is not None
    return [shlex.split(line)[1:] for line in block[1].replace("\\\n", " ").splitlines()]


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen photographs in the folders of three clients and of the server, and all that the commands write."""
    at = tmp_path_factory.mktemp("walk")
    annotated(at / "cameras" / "gate", "train", range(4), 1.6)
    annotated(at / "cameras" / "hall", "train", range(4, 8), 1.0)
    annotated(at / "cameras" / "yard", "train", range(8, 12), 0.6)
    annotated(at / "cameras" / "server", "test", range(12, 16), 1.3)
    photograph(at / "new" / "unseen.png", 40, 1.0)
    patch = pytest.MonkeyPatch()
    patch.chdir(at)
    fit, *others = commands()
    for words in (fit, *others):
        short = [] if words[0] == "export" else SHORT
        main([*words, *short])
    patch.undo()
    return at


def test_the_clients_train_at_the_size_of_their_persons(walked: Path) -> None:
    record = json.loads((walked / "lightning_logs" / "version_0" / "partition.json").read_text())
    told = {row["name"]: row["resolution"] for row in record["clients"].values()}
    # Figures of 77 to 205 pixels, most of them standing: boxes are lower than 128 in the yard alone.
    assert told == {"gate": [128, 96], "hall": told["hall"], "yard": [64, 48]}


def test_metrics_are_there_as_declared(walked: Path) -> None:
    last = rows(walked / "lightning_logs" / "version_0" / "metrics.csv")[-1]
    wanted = (
        "pck",
        "pck_strict",
        "ap",
        "ap50",
        "ap75",
        "ar",
        "pck_ankle",
        "pck_head_top",
        "pck_fine",
        "pck_fine_wrist",
    )
    assert {f"global/{name}" for name in wanted} <= last.keys()


def test_predictions_are_cocos_results_with_names(walked: Path) -> None:
    found = json.loads((walked / "joints.json").read_text())
    assert [(one["image_id"], one["file_name"]) for one in found] == [(seed, f"{seed}.png") for seed in range(12, 16)]
    assert all(one["joints"] == list(LSP.joints) for one in found)
    assert (walked / "joints.png").is_file()
    (new,) = json.loads((walked / "new.json").read_text())
    width, height = Image.open(walked / "new" / "unseen.png").size
    points = np.array(new["keypoints"]).reshape(-1, 3)[:, :2]
    # A box of 3:4 around the whole photograph is at most 4/3 of its width high.
    assert new["file_name"] == "unseen.png"
    assert (np.abs(points - [width / 2, height / 2]) <= max(height, width / 0.75)).all()


def test_pycocotools_scores_the_results_to_the_same_ap(walked: Path) -> None:
    coco = pytest.importorskip("pycocotools.coco")
    from pycocotools.cocoeval import COCOeval

    truth = coco.COCO(str(walked / "cameras" / "server" / "test.json"))
    evaluation = COCOeval(truth, truth.loadRes(str(walked / "joints.json")), "keypoints")
    evaluation.params.kpt_oks_sigmas = np.array(LSP.sigmas)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    last = rows(walked / "lightning_logs" / "version_0" / "metrics.csv")[-1]
    assert 0 < evaluation.stats[0] < 1
    for name, place in (("ap", 0), ("ap50", 1), ("ap75", 2), ("ar", 5)):
        assert float(last[f"global/{name}"]) == pytest.approx(100 * evaluation.stats[place], abs=1e-3)


def test_the_exported_program_finds_joints_on_the_new_photograph(walked: Path) -> None:
    told = {"model.json": ""}
    model = torch.export.load(walked / "exported" / "model.pt2", extra_files=told).module()
    picture = torch.from_numpy(np.array(Image.open(walked / "new" / "unseen.png"))).permute(2, 0, 1)
    height, width = (side // 4 * 4 for side in picture.shape[1:])
    found = model(picture[None, :, :height, :width])
    assert found["keypoints"].shape == (1, 14, 2)
    assert json.loads(told["model.json"])["joints"] == list(LSP.joints)
