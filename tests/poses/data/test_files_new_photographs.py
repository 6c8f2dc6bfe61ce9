"""Photographs in, joints out: in pixels of the original images, by names, in COCO's format and as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from lit_fed.poses import UDP, ClientPoses, KeypointEstimator, Puppets
from lit_fed.poses.data.files import photographs
from tests.poses.data.test_across_photos import NAMES
from tests.poses.data.test_client_poses import LEVELS, SMALL, TALL, file
from tests.support import rows, trainer


class Brightest(nn.Module):
    """Finds every joint where the picture is brightest."""

    stride = 1

    def __init__(self, joints: int) -> None:
        super().__init__()
        self.joints, self.weight = joints, nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return self.weight * images.mean(1, keepdim=True).expand(-1, self.joints, -1, -1)


def dot(path: Path, x: int, y: int, size: tuple[int, int] = (120, 90)) -> None:
    """A black photograph (height, width) with a soft white dot around a pixel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    down, across = np.mgrid[: size[0], : size[1]]
    light = 255 * np.exp(-((across - x) ** 2 + (down - y) ** 2) / 18)
    Image.fromarray(np.repeat(light.round().astype(np.uint8)[..., None], 3, axis=2)).save(path)


def finder(tmp_path: Path, joints: int = 5, per_joint: bool = False, **kwargs: Any) -> tuple[Any, Any, Any]:
    """A trainer that has trained for a round without a step of any length, and its parts."""
    root = tmp_path / "folders"
    file(root / "gate" / "train.json", [(1, {"bbox": TALL}), (2, {"bbox": TALL})])
    file(root / "yard" / "train.json", [(1, {"bbox": SMALL}), (2, {"bbox": SMALL})])
    file(root / "server" / "test.json", [(7, {}), (4, {})])
    data = ClientPoses(str(root), resolutions=LEVELS, test_fraction=0.0, **kwargs)
    still = lambda params: torch.optim.SGD(params, lr=0.0)  # noqa: E731
    model = KeypointEstimator(
        Brightest(joints), still, num_joints=joints, codec=UDP(stride=1), flip_pairs=[], flip_test=False,
        joint_names=NAMES if per_joint else None, per_joint=per_joint,
    )  # fmt: skip
    made, parts = trainer(tmp_path, max_rounds=1), (model, data, FedAvg())
    made.fit(*parts)
    return made, parts, tmp_path / "joints.json"


def test_joints_are_where_they_are_in_the_original_photographs(tmp_path: Path) -> None:
    made, parts, output = finder(tmp_path)
    dot(tmp_path / "new" / "b.png", 33, 71)
    dot(tmp_path / "new" / "a.jpg", 61, 20, size=(80, 200))
    made.predict(*parts, output=str(output), inputs=str(tmp_path / "new"))
    first, second = json.loads(output.read_text())
    assert (first["file_name"], second["file_name"]) == ("a.jpg", "b.png")
    assert (first["image_id"], second["image_id"]) == (0, 1)
    assert first["joints"] == second["joints"] == NAMES
    # A picture is 32 pixels high: 200/.75 and 120 of the photograph, so a pixel is 8.3 and 3.75 of it.
    for found, place, pixel in ((first, (61, 20), 8.4), (second, (33, 71), 3.75)):
        points = np.array(found["keypoints"]).reshape(-1, 3)
        assert np.abs(points[:, :2] - place).max() < pixel / 2
        assert found["score"] == pytest.approx(points[:, 2].mean())
    assert Image.open(tmp_path / "joints.png").size[0] > 200


@pytest.mark.parametrize("orientation", range(1, 9))
def test_joints_are_where_a_turned_photograph_shows_them(tmp_path: Path, orientation: int) -> None:
    dot(tmp_path / "a.png", 61, 20, size=(80, 200))
    exif = Image.Exif()
    exif[274] = orientation
    with Image.open(tmp_path / "a.png") as file:
        file.save(tmp_path / "a.png", exif=exif)
    with Image.open(tmp_path / "a.png") as file:
        shown = np.asarray(ImageOps.exif_transpose(file))[..., 0]
    place = np.unravel_index(shown.argmax(), shown.shape)[::-1]
    data = Puppets(samples_per_client=2, test_samples=2)
    data.setup()
    [batch] = data.new_inputs(tmp_path / "a.png").loader
    model = KeypointEstimator(Brightest(14), num_joints=14, codec=UDP(stride=1), flip_test=False)
    found = model.predict_step(data.view_of((64, 48))(batch), 0)["keypoints"][0].detach()
    assert np.abs(found.numpy() - place).max() < 200 / 0.75 / 64 / 2


def test_joints_without_a_length_are_said_in_two_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finder(tmp_path, per_joint=True)
    out = capsys.readouterr().out.splitlines()
    told = [line for line in out if line.startswith("the model declares") or "head_size" in line]
    assert told == [
        f"{tmp_path}/folders has no head_size, the length that pck divides by: pck is not measured",
        "the model declares 9 metrics that no evaluation reports: pck, pck_fine, pck_fine_hand, pck_fine_knee, "
        "pck_fine_nose, pck_hand, pck_knee, pck_nose, pck_strict",
    ]


def test_whole_photographs_and_repeated_boxes_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        dot(tmp_path / f"{name}.png", 5, 5)
    assert len(photographs(tmp_path, 5, 1.25).paths) == 2
    line = f"{tmp_path} has no boxes: one person is found on each of 2 photographs, even where it shows more\n"
    assert capsys.readouterr().out == line
    (tmp_path / "boxes.csv").write_text("file,left,top,width,height\na.png,0,0,9,9\na.png,0,0,9,9\nb.png,0,0,9,9\n")
    assert [path.name for path in photographs(tmp_path, 5, 1.25).paths] == ["a.png", "b.png"]
    assert "1 of 3 boxes repeat another of their image; each counts once" in capsys.readouterr().out


def test_boxes_of_another_photograph_are_refused(tmp_path: Path) -> None:
    dot(tmp_path / "a.png", 5, 5)
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": 120, "height": 90}],
        "annotations": [{"id": 1, "image_id": 1, "bbox": [0, 0, 9, 9]}],
    }
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"a.png has 90×120 pixels, upright by .*boxes.json states 120×90; annotate"):
        photographs(tmp_path, 5, 1.25)


def test_a_table_has_a_row_per_joint(tmp_path: Path) -> None:
    made, parts, _ = finder(tmp_path)
    dot(tmp_path / "new" / "a.png", 33, 71)
    made.predict(*parts, output=str(tmp_path / "p.csv"), inputs=str(tmp_path / "new" / "a.png"))
    table = rows(tmp_path / "p.csv")
    assert list(table[0]) == ["image_id", "file", "person", "joint", "x", "y", "score"]
    assert [row["joint"] for row in table] == NAMES
    assert {row["file"] for row in table} == {"a.png"}
    assert all(abs(float(row["x"]) - 33) < 2 and abs(float(row["y"]) - 71) < 2 for row in table)


def test_two_persons_by_their_boxes(tmp_path: Path) -> None:
    made, parts, output = finder(tmp_path)
    dot(tmp_path / "new" / "images" / "a.png", 20, 30, size=(100, 100))
    dot(tmp_path / "b.png", 70, 60, size=(100, 100))
    both = sum(
        np.asarray(Image.open(at)).astype(int) for at in (tmp_path / "new" / "images" / "a.png", tmp_path / "b.png")
    )
    Image.fromarray(np.asarray(both).clip(0, 255).astype(np.uint8)).save(tmp_path / "new" / "images" / "a.png")
    boxes = [[5, 10, 30, 40], [55, 40, 30, 40]]
    (tmp_path / "new" / "boxes.csv").write_text(
        "file,left,top,width,height\n" + "".join(f"a.png,{','.join(map(str, box))}\n" for box in boxes)
    )
    content = {
        "images": [{"id": 12, "file_name": "a.png"}],
        "annotations": [{"id": one, "image_id": 12, "bbox": box} for one, box in enumerate(boxes)],
    }
    (tmp_path / "new" / "of_a_detector.json").write_text(json.dumps(content))
    for inputs, number in ((tmp_path / "new", 0), (tmp_path / "new" / "of_a_detector.json", 12)):
        made.predict(*parts, output=str(output), inputs=str(inputs), overwrite=True)
        found = json.loads(output.read_text())
        assert [one["image_id"] for one in found] == [number, number]
        for one, place in zip(found, ((20, 30), (70, 60)), strict=True):
            assert np.abs(np.array(one["keypoints"]).reshape(-1, 3)[:, :2] - place).max() < 1.25


def test_test_data_have_the_numbers_and_names_of_their_images(tmp_path: Path) -> None:
    made, parts, output = finder(tmp_path)
    made.predict(*parts, output=str(output))
    assert [(one["image_id"], one["file_name"]) for one in json.loads(output.read_text())] == [
        (7, "test7.png"), (4, "test4.png")
    ]  # fmt: skip
    made.predict(*parts, output=str(tmp_path / "p.csv"))
    table = rows(tmp_path / "p.csv")
    assert {(row["image_id"], row["file"]) for row in table} == {("7", "test7.png"), ("4", "test4.png")}
    with pytest.raises(ConfigError, match=r"joints.json exists"):
        made.predict(*parts, output=str(output))


def test_drawn_figures_write_records_too(tmp_path: Path) -> None:
    data = Puppets(samples_per_client=2, test_samples=3)
    model = KeypointEstimator(Brightest(14), num_joints=14, codec=UDP(stride=1), flip_pairs=data.flip_pairs)
    made, parts = trainer(tmp_path, max_rounds=1), (model, data, FedAvg())
    made.fit(*parts)
    made.predict(*parts, output=str(tmp_path / "joints.json"))
    found = json.loads((tmp_path / "joints.json").read_text())
    assert [one["file_name"] for one in found] == ["figure 0", "figure 1", "figure 2"]
    assert found[0]["joints"] == list(data.joint_names)
    dot(tmp_path / "a.png", 40, 50, size=(128, 96))
    made.predict(*parts, output=str(tmp_path / "new.json"), inputs=str(tmp_path / "a.png"))
    (one,) = json.loads((tmp_path / "new.json").read_text())
    assert np.abs(np.array(one["keypoints"]).reshape(-1, 3)[:, :2] - (40, 50)).max() < 1.5


def _csv(text: str) -> Any:
    return lambda at: (at / "boxes.csv").write_text(text)


def _json(content: Any) -> Any:
    return lambda at: (at / "boxes.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (
            _csv("file,left,top\na.png,1,2\n"),
            "boxes.csv lacks the column width; it must have file, left, top, width, h",
        ),
        (_csv("file,left,top,width,height\n"), "boxes.csv has no box; give one per person"),
        (
            _csv("file,left,top,width,height\na.png,1,2,x,4\n"),
            "boxes.csv: line 2 has the box .*; it must be four numbers",
        ),
        (_csv("file,left,top,width,height\na.png,90,2,3,4\n"), "which does not lie in a.png, 90×120 pixels"),
        (_csv("file,left,top,width,height\na.png,1,2,0,4\n"), "line 2 has the box .* which does not lie in a.png"),
        (_csv("file,left,top,width,height\na.png,1,2,nan,4\n"), "line 2 has the box .* which does not lie in a.png"),
        (_csv("file,left,top,width,height\nz.png,1,2,3,4\n"), "images/z.png does not exist; put it there"),
        (_json([{"image_id": 1, "bbox": [0, 0, 1, 1]}]), "boxes.json is not a file of COCO boxes"),
        (_json({"images": [], "annotations": [{"image_id": 1, "bbox": [0, 0, 1, 1]}]}), "names an unlisted image"),
        (_json({"images": [], "annotations": []}), "boxes.json has no box"),
        (lambda at: (at / "a.png").write_bytes(b"none"), "a.png cannot be decoded"),
        (lambda at: [(at / name).write_text("") for name in ("boxes.csv", "boxes.json")], "remove one of them"),
    ],
)
def test_inputs_that_cannot_be_used(tmp_path: Path, prepare: Any, words: str) -> None:
    dot(tmp_path / "a.png", 5, 5)
    prepare(tmp_path)
    with pytest.raises(ConfigError, match=words):
        photographs(tmp_path, 5, 1.25)


def test_other_inputs_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"x.npz is not an image; name photographs, their folder, or a .json or .csv"):
        photographs(tmp_path / "x.npz", 5, 1.25)
    with pytest.raises(ConfigError, match="does not exist; name a folder of"):
        photographs(tmp_path / "absent", 5, 1.25)
