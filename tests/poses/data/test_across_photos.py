"""Persons on photographs, read from files written here in the published formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from scipy.io import savemat
from torch import Tensor

from lit_fed.data import Batches
from lit_fed.errors import ConfigError
from lit_fed.poses import CocoKeypoints, Mpii, PoseAugmentation
from lit_fed.poses.data import LSP, MPII, Skeleton
from lit_fed.poses.data.people import pairs_by_name
from tests.poses.data.support import POINTS, STILL, generator, image, mpii_files, mpii_row, same

NAMES = ["nose", "left_hand", "right_hand", "left_knee", "right_knee"]
SIZES = {1: (40, 30), 2: (64, 80), 3: (50, 50)}  # height and width of images


def annotation(number: int, image_id: int, **changes: Any) -> dict[str, Any]:
    """Five joints around the middle of a box of 12×20 pixels at (10, 8); the last one is not labelled."""
    joints = [16.0, 10.0, 2, 12.0, 18.0, 1, 20.0, 17.0, 2, 14.0, 26.0, 2, 0.0, 0.0, 0]
    row = {"id": number, "image_id": image_id, "category_id": 1, "iscrowd": 0, "keypoints": joints}
    return row | {"bbox": [10.0, 8.0, 12.0, 20.0], "area": 200.0} | changes


def coco(root: Path, train: list[dict[str, Any]] | None = None, **category: Any) -> Path:
    """A data set of three images, all of which are trained and tested on."""
    for number, size in SIZES.items():
        image(root / "images", f"{number}.png", size, number)
    content = {
        "images": [{"id": number, "file_name": f"{number}.png"} for number in SIZES],
        "categories": [{"id": 1, "name": "person", "keypoints": NAMES, "skeleton": [[1, 2], [1, 3]]} | category],
    }
    plain = [annotation(10 + number, number) for number in SIZES]
    for name, rows in (("train.json", plain if train is None else train), ("test.json", plain)):
        (root / name).write_text(json.dumps(content | {"annotations": rows}))
    return root


def reading(root: Path, **kwargs: Any) -> CocoKeypoints:
    files = {"train_file": "train.json", "test_file": "test.json", "train_images": "images", "test_images": "images"}
    settings = {"root": str(root), "num_clients": 1, "resolutions": [(32, 24), (16, 12)], "batch_size": 2}
    return CocoKeypoints(**(files | settings | kwargs))


def ready(root: Path, **kwargs: Any) -> CocoKeypoints:
    data = reading(root, **kwargs)
    data.setup()
    return data


# ---------------------------------------------------------------------- COCO


def test_joints_are_those_of_the_file(tmp_path):
    data = reading(coco(tmp_path))
    assert data.joint_names == tuple(NAMES)
    assert data.num_joints == 5
    assert data.flip_pairs == ((1, 2), (3, 4))  # by their names
    assert data.skeleton_edges == ((0, 1), (0, 2))  # the file counts from 1
    assert data.skeleton.upper == (True, True, True, False, False)
    told = reading(coco(tmp_path, flip_pairs=[[1, 2]]))
    assert told.flip_pairs == ((1, 2),)


def test_a_box_by_hand(tmp_path):
    # 12×20 at (10, 8): middle (16, 18); 20 > 12·4/3, so 20·1.25 = 25 high. At 32×24 a pixel is 25/32 of the image's:
    # the nose at (16, 10) comes to (12, 16)·1 + (0, −8)·32/25 − ½ = (11.5, 5.26).
    data = ready(coco(tmp_path))
    batch = next(iter(data.test_loader()))
    torch.testing.assert_close(batch["keypoints"][:, 0], torch.tensor([[11.5, 5.26]] * 3))
    assert batch["visible"].tolist() == [[1.0, 1.0, 1.0, 1.0, 0.0]] * 3
    assert batch["head_size"].isnan().all()
    assert batch["center"].tolist() == [[16.0, 18.0]] * 3
    assert batch["scale"].tolist() == pytest.approx([25 / 32] * 3)
    assert batch["area"].tolist() == pytest.approx([200 * (32 / 25) ** 2] * 3)
    assert batch["image_id"].tolist() == [1, 2, 3]
    wide = ready(coco(tmp_path, [annotation(1, 2, bbox=[10.0, 8.0, 30.0, 20.0], head_size=5.0)]))
    # 30·4/3·1.25 = 50 high
    person, truth = next(iter(wide.make_loader(Batches("train", np.array([0]), 1))))
    assert (float(person["extent"]), float(truth["head_size"])) == (50.0, 5.0)


def test_pictures_are_those_of_the_files_and_black_beyond(tmp_path):
    root = coco(tmp_path, [annotation(1, 2, bbox=[20.0, 16.0, 24.0, 32.0])])
    data = ready(root, padding=1.0, augmentation=STILL, mean=[0.0], std=[1.0])
    batch = next(iter(data.train_loader(0, generator())))
    pixels = np.asarray(Image.open(root / "images" / "2.png"), dtype=np.float32)
    # The middle is (32, 32), the picture's (11.5, 15.5): pixel x of the picture lies at 32 + x − 11.5, between two.
    shown = pixels[16:49, 20:45] / 255
    between = (shown[:-1, :-1] + shown[1:, :-1] + shown[:-1, 1:] + shown[1:, 1:]) / 4
    np.testing.assert_allclose(batch["image"][0].permute(1, 2, 0), between, atol=1e-5)
    outside = ready(
        coco(tmp_path, [annotation(1, 1, bbox=[20.0, 10.0, 24.0, 32.0])]),
        padding=1.0,
        augmentation=STILL,
        mean=[0.0],
        std=[1.0],
    )
    picture = next(iter(outside.train_loader(0, generator())))["image"][0]
    # The image ends after column 29, which is column 9 of the picture, and after row 39, row 29.
    assert float(picture[:, :, 10:].abs().max()) == 0.0
    assert float(picture[:, 30:].abs().max()) == 0.0
    assert float(picture[:, :29, :9].min()) > 0.0


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_upright_before_persons_are_cut_out(tmp_path: Path, orientation: int) -> None:
    def picture(name: str, **settings: Any) -> Tensor:
        root = coco(tmp_path / name, [annotation(1, 2, bbox=[20.0, 16.0, 24.0, 32.0])])
        with Image.open(root / "images" / "2.png") as file:
            exif = file.getexif()
            exif[274] = orientation
            file.save(root / "images" / "2.png", exif=exif)
        if name == "upright":  # its pixels as they are shown, without EXIF data
            with Image.open(root / "images" / "2.png") as file:
                ImageOps.exif_transpose(file).save(root / "images" / "2.png")
        data = ready(root, augmentation=STILL, **settings)
        found: Tensor = next(iter(data.train_loader(0, generator())))["image"]
        return found

    wanted = picture("upright")
    for settings in ({}, {"num_workers": 1}, {"remember": True}):
        assert torch.equal(picture("turned", **settings), wanted)


def test_a_photograph_of_another_size_than_stated_is_refused(tmp_path: Path) -> None:
    root = coco(tmp_path)
    content = json.loads((root / "train.json").read_text())
    for entry in content["images"]:
        height, width = SIZES[entry["id"]]
        entry |= {"width": width, "height": height}
    (root / "train.json").write_text(json.dumps(content))
    assert len(list(ready(root, batch_size=3).train_loader(0, generator()))) == 1
    with Image.open(root / "images" / "2.png") as file:
        exif = file.getexif()
        exif[274] = 6  # as a phone held upright stores 80×64 pixels, annotated by a tool that does not turn them
        file.save(root / "images" / "2.png", exif=exif)
    with pytest.raises(
        ConfigError,
        match=r"images/2.png has 64×80 pixels, upright by its EXIF orientation, and .*train.json states 80×64; annot",
    ):
        list(ready(root, batch_size=3).train_loader(0, generator()))
    content["images"][0]["width"] = "wide"
    (root / "train.json").write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"train.json: image 1 has a width or height that is not a number; correct it"
    ):
        ready(root)


def test_what_nothing_can_be_learnt_from_is_left_out(tmp_path):
    rows = [
        annotation(1, 1, iscrowd=1),
        annotation(2, 1, keypoints=[0.0] * 15),
        annotation(3, 2, bbox=[10.0, 8.0, 0.0, 20.0]),
        annotation(4, 2, category_id=7),
        annotation(5, 3),
    ]
    data = ready(coco(tmp_path, rows))
    assert data.census.num_samples(0) == 1
    assert [len(batch["image"]) for batch in data.train_loader(0, generator())] == [1]


def test_images_of_all_sizes_make_a_batch_whoever_prepares_them(tmp_path):
    root = coco(tmp_path)
    loaders = []
    for kwargs in ({}, {"num_workers": 2}, {"remember": True}, {"remember": True}):
        data = ready(root, augmentation=PoseAugmentation(), batch_size=3, **kwargs)
        loaders.append([list(data.train_loader(0, generator(5))), list(data.test_loader())])
        if "remember" in kwargs:
            loaders.append([list(data.train_loader(0, generator(5))), list(data.test_loader())])
        data.teardown("fit")
    assert loaders[0][0][0]["image"].shape == (3, 3, 32, 24)
    for other in loaders[1:]:
        assert all(same(one, two) for one, two in zip(loaders[0], other, strict=True))


def test_a_cut_out_shows_what_the_whole_image_does(tmp_path):
    """Augmented pictures from the part of the image that a worker cuts out, against the image as a whole."""
    root = coco(tmp_path)
    data = ready(root, batch_size=1, mean=[0.0], std=[1.0], augmentation=PoseAugmentation(half_body_joints=3))
    for epoch in range(20):
        for person, truth in data.make_loader(Batches("train", np.arange(3), 1, generator(epoch), training=True)):
            whole = np.asarray(Image.open(root / "images" / f"{int(truth['image_id'])}.png"))
            # Its own joints tell where the part was cut: the nose is at (16, 10) of the image.
            origin = torch.tensor([16.0, 10.0]) - truth["keypoints"][0, 0]
            full = {**person, "canvas": torch.from_numpy(whole.transpose(2, 0, 1).copy())[None]}
            full["centre"] = person["centre"] + origin
            moved = {**truth, "keypoints": truth["keypoints"] + origin}
            cut, uncut = data.view(0)((person, truth)), data.view(0)((full, moved))
            for one, two in zip((cut, *cut["levels"]), (uncut, *uncut["levels"]), strict=True):
                torch.testing.assert_close(one["image"], two["image"], rtol=0, atol=1e-4)
                torch.testing.assert_close(one["keypoints"], two["keypoints"], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        ({"train": [annotation(9, 1, keypoints=[1.0] * 12)]}, "annotation 9 has 12 numbers .* and 5 joints take 15"),
        ({"train": [annotation(9, 1, bbox=[1.0])]}, r"annotation 9 has no bbox \[x, y, width, height\]; add it"),
        ({"train": [annotation(9, 77)]}, "annotation 9 names an unlisted image"),
        ({"train": [annotation(9, 1, keypoints=[0.0] * 15)]}, "train.json has no person with a visible joint"),
        ({"flip_pairs": [[0, 5]]}, r"train.json: flip pair \[0, 5\] is out of range; give two of the 5 joints, 0 … 4"),
        ({"flip_pairs": [[0, 1], [1, 2]]}, "train.json: joint 1 is in two flip pairs"),
        ({"skeleton": [[1, 6]]}, r"train.json: skeleton \[1, 6\] is out of range; give two of the joints 1 … 5"),
        ({"keypoints": []}, "train.json is not a file of COCO key points; it needs images, annotations, and"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(tmp_path, break_it, message):
    with pytest.raises(ConfigError, match=message):
        ready(coco(tmp_path, **break_it))


def test_what_is_missing_is_named(tmp_path):
    root = coco(tmp_path)
    with pytest.raises(
        ConfigError, match=r"nowhere.json does not exist; put it there, or set data.root, data.train_file"
    ):
        ready(root, train_file="nowhere.json")
    (root / "images" / "2.png").unlink()
    with pytest.raises(
        ConfigError, match=r"2.png is missing, the first of 1 of the 3 images of .*train.json; put them"
    ):
        ready(root)
    (root / "images" / "2.png").write_bytes(b"no picture")
    data = ready(root, num_workers=1)
    with pytest.raises(ConfigError, match=r"2.png cannot be decoded; replace it, or remove its persons"):
        list(data.test_loader())
    (root / "test.json").write_text("[")
    with pytest.raises(ConfigError, match=r"test.json cannot be read as JSON"):
        ready(root)


def test_training_and_test_files_are_of_one_data_set(tmp_path):
    coco(tmp_path / "a")
    coco(tmp_path / "b", keypoints=[*NAMES[:4], "left_foot"])
    (tmp_path / "a" / "test.json").write_text((tmp_path / "b" / "train.json").read_text())
    with pytest.raises(ConfigError, match=r"test.json has other joints than train.json"):
        ready(tmp_path / "a")


def test_clients_need_their_samples(tmp_path):
    message = r"data.samples_per_client 2 for 2 clients takes 4 persons, and .*train.json has 3; lower it"
    with pytest.raises(ConfigError, match=message):
        ready(coco(tmp_path), num_clients=2, samples_per_client=2)
    assert ready(tmp_path, num_clients=2, samples_per_client=1).census.num_samples(1) == 1
    with pytest.raises(ConfigError, match=r"data.padding is 0"):
        reading(tmp_path, padding=0.0)


# ---------------------------------------------------------------------- skeletons


def test_the_skeletons_that_are_built_in():
    for skeleton in (LSP, MPII):
        # MPII's and LSP's pairs, as HRNet's code and the data set's readme list them, are those of the names.
        assert {frozenset(pair) for pair in skeleton.flip_pairs} == {
            frozenset(p) for p in pairs_by_name(skeleton.joints)
        }
    assert MPII.joints[6:8] == ("pelvis", "thorax")
    assert MPII.unscored == (6, 7)
    assert [name for name, upper in zip(MPII.joints, MPII.upper, strict=True) if not upper] == list(MPII.joints[:7])
    with pytest.raises(ConfigError, match=r"has no joints"):
        Skeleton(())
    with pytest.raises(ConfigError, match=r"unscored \[3\] is out of range"):
        Skeleton(("a", "b"), unscored=(3,))


# ---------------------------------------------------------------------- MPII


def mpii(root: Path, rows: list[dict[str, Any]], **kwargs: Any) -> Mpii:
    mpii_files(root, rows)
    return Mpii(root=str(root), num_clients=1, resolutions=[(32, 24)], **kwargs)


def person_of(data: Mpii, subset: Any = "test", index: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """A person's box, in pixels of the image, and its truth."""
    data.setup()
    person, truth = next(iter(data.make_loader(Batches(subset, np.array([index]), 1))))
    truth["keypoints"] = truth["keypoints"] + person["origin"]
    return person | {"centre": person["centre"] + person["origin"]}, truth


def test_mpii_by_hand(tmp_path):
    # Counted from 0: middle (30, 40 + 15·.2) = (30, 43); 200·.2·1.25 = 50 high; the head 25·.2 = 5.
    person, truth = person_of(mpii(tmp_path, [mpii_row(), mpii_row(joints_vis=[0] * 16)]))
    assert person["centre"].tolist() == [[30.0, 43.0]]
    assert person["extent"].tolist() == [50.0]
    assert truth["head_size"].tolist() == [5.0]
    assert truth["visible"].tolist() == [[0.0] + [1.0] * 15]
    torch.testing.assert_close(truth["keypoints"][0, 1:], torch.tensor(POINTS[1:] - 1, dtype=torch.float32))


def mat(root: Path, images: int = 20) -> Path:
    """MPII's own form: the first image is not annotated, the second has a person without joints too."""
    point = np.array([(float(x), float(y), joint) for joint, (x, y) in enumerate(POINTS) if joint], dtype=object)
    points = np.array([tuple(row) for row in point], dtype=[("x", "O"), ("y", "O"), ("id", "O")])
    place = {"x": 31.0, "y": 41.0}
    known = {
        "x1": 20.0,
        "y1": 10.0,
        "x2": 23.0,
        "y2": 14.0,
        "scale": 0.2,
        "objpos": place,
        "annopoints": {"point": points},
    }
    unknown = known | {"annopoints": np.array([])}
    list_of = np.empty(images + 1, dtype=[("image", "O"), ("annorect", "O")])
    for number in range(images + 1):
        rects = np.empty(2 if number == 1 else 1, dtype=[(name, "O") for name in known])
        for place_idx, rect in enumerate([known, unknown][: len(rects)]):
            rects[place_idx] = tuple(rect.values())
        list_of[number] = ({"name": f"{number}.png"}, rects)
        image(root / "images", f"{number}.png", (80, 60), number)
    train = np.array([0] + [1] * images)
    path = root / "mpii_human_pose_v1_u12_1.mat"
    savemat(path, {"RELEASE": {"annolist": list_of, "img_train": train}})
    return path


def test_mpiis_own_file_says_the_same(tmp_path):
    path = mat(tmp_path)
    data = Mpii(root=str(tmp_path), train_file=path.name, test_file=path.name, num_clients=1, resolutions=[(32, 24)])
    own, truth = person_of(data)
    other, expected = person_of(mpii(tmp_path, [mpii_row()]))
    for name in ("centre", "extent"):
        assert torch.equal(own[name], other[name])
    for name in ("keypoints", "visible"):
        assert torch.equal(truth[name], expected[name])
    # .6 of the diagonal of the head's box, 3×4
    assert truth["head_size"].tolist() == pytest.approx([3.0])
    # Of 20 annotated images every tenth is to test on; image 1's second person has no joints.
    assert (data.census.num_samples(0), data.test_loader(0).num_samples) == (18, 2)
    names = [path.name for path in data._albums["test"].paths]
    assert names == ["10.png", "20.png"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"joints": POINTS[:15].tolist()}, r"person 0 has joints of shape \(15, 2\) and .*and MPII has 16 joints"),
        ({"scale": None}, "train.json: person 0 needs image, center, scale, joints and joints_vis"),
        ({"scale": -1.0}, "train.json: person 0 has a box without size"),
        ({"joints_vis": [0] * 16}, "train.json has no person with a visible joint"),
        ({"image": "b.png"}, r"b.png is missing, the first of 1 of the 1 images"),
    ],
)  # fmt: skip
def test_mpii_that_cannot_be_used(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        mpii(tmp_path, [mpii_row(**changes)]).setup()


def test_a_file_that_is_not_mpiis(tmp_path):
    savemat(tmp_path / "other.mat", {"x": 1})
    with pytest.raises(ConfigError, match=r"other.mat is not MPII's file; it needs RELEASE"):
        mpii(tmp_path, [mpii_row()], train_file="other.mat").setup()
    with pytest.raises(ConfigError, match=r"none.mat does not exist; put it there"):
        mpii(tmp_path, [mpii_row()], train_file="none.mat").setup()
