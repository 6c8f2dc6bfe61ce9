"""Clients of one's own: by a key of the annotations, or a folder each; and other data written as such folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fed.command.cli import main
from lit_fed.data import Natural
from lit_fed.errors import ConfigError
from lit_fed.poses import ClientPoses, CocoKeypoints, Puppets
from lit_fed.poses.data import pose_settings_of, write_pose_folders
from tests.poses.data.support import STILL, generator, image, same
from tests.poses.data.test_across_photos import NAMES, annotation

LEVELS: Any = [(32, 24), (16, 12)]
TALL, SMALL = [10.0, 8.0, 12.0, 40.0], [10.0, 8.0, 12.0, 20.0]  # boxes, 50 and 25 pixels high with the padding


def file(path: Path, persons: list[tuple[int, dict[str, Any]]], names: list[str] = NAMES) -> None:
    """A key point file of one person per image of 60×70 pixels, numbered from 1 in every file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, _ in persons:
        image(path.parent / "images", f"{path.stem}{number}.png", (70, 60), number)
    content = {
        "images": [
            {"id": number, "file_name": f"{path.stem}{number}.png", "width": 60, "height": 70} for number, _ in persons
        ],
        "categories": [{"id": 1, "name": "person", "keypoints": names, "skeleton": [[1, 2]]}],
        "annotations": [annotation(100 + number, number) | changes for number, changes in persons],
    }
    path.write_text(json.dumps(content))


def folders(root: Path) -> Path:
    """Two cameras: one sees persons tall, the other small; the first has a test file."""
    file(root / "gate" / "train.json", [(number, {"bbox": TALL}) for number in range(1, 5)])
    file(root / "gate" / "test.json", [(number, {"bbox": TALL}) for number in range(1, 3)])
    file(root / "yard" / "train.json", [(number, {"bbox": SMALL}) for number in range(1, 6)])
    return root


def ready(root: Path, clients: Any = None, **kwargs: Any) -> ClientPoses:
    data = ClientPoses(str(root), **({"resolutions": LEVELS, "batch_size": 2} | kwargs))
    data.setup(clients=clients)
    return data


# ---------------------------------------------------------------------- a key


def keyed(root: Path, persons: list[tuple[int, dict[str, Any]]], **kwargs: Any) -> CocoKeypoints:
    file(root / "train.json", persons)
    file(root / "test.json", [(1, {"camera": "b"}), (2, {"camera": "elsewhere"})])
    settings = {"train_file": "train.json", "test_file": "test.json", "train_images": "images", "test_images": "images"}
    return CocoKeypoints(root=str(root), resolutions=LEVELS, client_key="camera", **settings, **kwargs)


CAMERAS = [(1, {"camera": "b", "bbox": TALL}), (2, {"camera": "a", "bbox": SMALL}), (3, {"camera": "b", "bbox": TALL})]


def test_a_key_of_the_annotations_names_the_clients(tmp_path: Path) -> None:
    data = keyed(tmp_path, CAMERAS)
    data.setup()
    assert isinstance(data.partition, Natural)
    assert data.client_names == ["a", "b"]
    assert [data.census.num_samples(client) for client in range(2)] == [1, 2]
    # Boxes of 25 pixels are lower than the level of 32, boxes of 50 are not.
    assert [data.describe(client)["resolution"] for client in range(2)] == [[16, 12], [32, 24]]
    assert len(next(iter(data.test_loader(1)))["image"]) == 1  # of its own camera
    assert len(next(iter(data.test_loader()))["image"]) == 2
    assert next(iter(data.train_loader(0, generator())))["image"].shape == (1, 3, 16, 12)


def test_a_clients_input_size_is_a_setting(tmp_path: Path) -> None:
    data = keyed(tmp_path, CAMERAS, input_sizes={"a": (32, 24)})
    data.setup()
    assert [data.level(client) for client in range(2)] == [0, 0]


def test_a_key_of_the_images_names_the_clients_too(tmp_path: Path) -> None:
    file(tmp_path / "train.json", [(1, {}), (2, {})])
    content = json.loads((tmp_path / "train.json").read_text())
    for entry in content["images"]:
        entry["site"] = entry["id"] % 2
    (tmp_path / "train.json").write_text(json.dumps(content))
    settings = {"train_images": "images", "test_images": "images", "client_key": "site"}
    data = CocoKeypoints(str(tmp_path), "train.json", "train.json", resolutions=LEVELS, **settings)  # type: ignore[arg-type]
    assert data.own_client_names() == ["0", "1"]


@pytest.mark.parametrize(
    ("persons", "settings", "words"),
    [
        ([(1, {})], {}, r"annotation 101 and its image train1.png have no key 'camera'; name the client there"),
        (CAMERAS, {"input_sizes": {"c": (32, 24)}}, r"names client 'c', which does not exist; the clients are a, b"),
        (CAMERAS, {"input_sizes": {"a": (30, 24)}}, r"data.input_sizes has \[30, 24\] for client a; it must be one of"),
        (CAMERAS, {"clients_per_level": [1, 1]}, "data.clients_per_level is for simulated clients"),
        (CAMERAS, {"samples_per_client": 1}, "data.samples_per_client is for simulated clients"),
        ([(1, {"camera": "a", "bbox": [70.0, 0.0, 5.0, 5.0]})], {}, "outside of its image train1.png, 60×70"),
        (
            [(1, {"camera": "a", "bbox": [0.0, -9.0, 5.0, 9.0]})],
            {},
            "annotation 101 has the box .* outside of its image",
        ),
        ([(1, {"camera": "a", "bbox": ["x", 0, 5, 5]})], {}, "annotation 101 holds something else than numbers"),
        ([(1, {"camera": "a", "image_id": 1.5})], {}, "annotation 101 has image_id 1.5; it must be a whole number"),
    ],
)
def test_keys_and_boxes_that_cannot_be(
    tmp_path: Path, persons: list[tuple[int, dict[str, Any]]], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        keyed(tmp_path, persons, **settings).setup()


def test_natural_needs_clients(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.partition is Natural, and data.client_key is None; set it to the key"):
        CocoKeypoints(str(tmp_path), partition=Natural())
    with pytest.raises(ConfigError, match="Puppets does not name clients; choose IID"):
        Puppets(partition=Natural())
    with pytest.raises(ConfigError, match=r"data.input_sizes is for data.partition Natural"):
        Puppets(input_sizes={"a": (64, 48)})


# ---------------------------------------------------------------------- a folder each


def test_a_folder_a_client_by_hand(tmp_path: Path) -> None:
    data = ready(folders(tmp_path))
    assert data.client_names == ["gate", "yard"]
    # The yard has no test file: ⌊.2·5⌋ = 1 of its images is held out.
    assert [data.census.num_samples(client) for client in range(2)] == [4, 4]
    assert [data.level(client) for client in range(2)] == [0, 1]
    assert [len(next(iter(data.test_loader(client)))["image"]) for client in range(2)] == [2, 1]
    shared = next(iter(data.test_loader()))
    assert len(shared["image"]) == 3  # without a server's folder: of all clients
    assert len(set(shared["image_id"].tolist())) == 3  # both files have an image 1, of two photographs


def test_the_counts_that_are_held_out_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file(tmp_path / "hall" / "train.json", [(number, {}) for number in range(1, 5)])
    ready(folders(tmp_path), test_fraction=0.2)
    # ⌊.2·4⌋ = 0 of the hall, ⌊.2·5⌋ = 1 of the yard; the gate has a file of two.
    line = "data.test_fraction 0.2 holds out persons to test on: 0 of hall, 1 of yard"
    told = capsys.readouterr().out.splitlines()
    assert f"{line}; the shared test set is the clients' 3 test images" in told
    ready(tmp_path, clients=[1, 2], client_folders=["gate", "hall", "yard"])
    assert line in capsys.readouterr().out.splitlines()
    file(tmp_path / "server" / "test.json", [(1, {})])
    ready(tmp_path)
    assert line in capsys.readouterr().out.splitlines()
    ready(tmp_path, test_fraction=0.0)
    assert "test_fraction" not in capsys.readouterr().out


def test_a_person_that_a_file_repeats_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"keypoints": [float(value) for value in range(15)]}
    file(tmp_path / "gate" / "train.json", [(1, {}), (1, {"id": 7}), (1, {"id": 8}), (1, other), (2, {})])
    data = ready(tmp_path, test_fraction=0.0)
    assert data.census.num_samples(0) == 3
    told = [line for line in capsys.readouterr().out.splitlines() if "repeat" in line]
    assert told == [
        f"{tmp_path}/gate/train.json: 2 annotations, such as 7, repeat the image, box and joints of another; each "
        "person counts once"
    ]
    content = json.loads((tmp_path / "gate" / "train.json").read_text())
    content["images"].append({"id": 2, "file_name": "train1.png"})
    (tmp_path / "gate" / "train.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"lists image 2 as train2.png and as train1.png; give each its own id"):
        ready(tmp_path)


def test_a_node_has_what_it_has_among_all(tmp_path: Path) -> None:
    settings: Any = {"val_fraction": 0.25, "client_folders": ["gate", "yard"]}
    everybody = ready(folders(tmp_path / "all"), **settings)
    (tmp_path / "node").mkdir()
    (tmp_path / "all" / "yard").rename(tmp_path / "node" / "yard")
    alone = ready(tmp_path / "node", [1], **settings)
    (tmp_path / "node" / "yard").rename(tmp_path / "all" / "yard")
    assert alone.census.fingerprint(1) == everybody.census.fingerprint(1) != everybody.census.fingerprint(0)
    (tmp_path / "all" / "yard").rename(tmp_path / "node" / "yard")
    here = [list(alone.train_loader(1, generator())), list(alone.val_loader(1)), list(alone.test_loader(1))]
    (tmp_path / "node" / "yard").rename(tmp_path / "all" / "yard")
    there = [
        list(everybody.train_loader(1, generator())),
        list(everybody.val_loader(1)),
        list(everybody.test_loader(1)),
    ]
    for own, among_all in zip(here, there, strict=True):
        for one, other in zip(own, among_all, strict=True):
            assert same(_known(one), _known(other))
    assert not len(list(alone.test_loader()))  # the shared test set is the server's


def _known(batch: dict[str, Any]) -> list[Any]:
    """A batch without the images' numbers, which count the images here."""
    return [value for name, value in batch.items() if name != "image_id"]


def test_a_server_without_data_knows_the_joints(tmp_path: Path) -> None:
    from lit_fed.poses import Skeleton

    data = ready(tmp_path, [], client_folders=["gate", "yard"], skeleton=Skeleton(tuple(NAMES)))
    assert (data.num_clients, data.num_joints) == (2, 5)
    assert not len(list(data.test_loader()))
    file(tmp_path / "server" / "test.json", [(1, {}), (2, {})])
    data = ready(tmp_path, [], client_folders=["gate", "yard"])
    assert next(iter(data.test_loader()))["image_id"].tolist() == [1, 2]


def _empty(root: Path) -> None:
    file(root / "hall" / "train.json", [(1, {"keypoints": [0.0] * 15})])


def _others(root: Path) -> None:
    file(root / "hall" / "train.json", [(1, {})], ["head", "left_hand", "right_hand", "left_knee", "right_knee"])


def _no_file(root: Path) -> None:
    (root / "hall").mkdir()


def _no_image(root: Path) -> None:
    (root / "yard" / "images" / "train2.png").unlink()


def _outside(root: Path) -> None:
    file(root / "hall" / "train.json", [(1, {"bbox": [5.0, 70.0, 3.0, 3.0]})])


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (_empty, r"hall/train.json has no person with a visible joint; give at least one"),
        (_others, r"hall/train.json has other joints than .*gate/train.json \(5, head, left_hand"),
        (_no_file, r"hall/train.json does not exist; put it there, or set data.root and data.client_folders"),
        (_no_image, r"yard/images/train2.png is missing, the first of 1 of the [0-9] images"),
        (_outside, r"hall/train.json: annotation 101 has the box .* outside of its image train1.png"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path: Path, prepare: Any, words: str) -> None:
    prepare(folders(tmp_path))
    with pytest.raises(ConfigError, match=words):
        ready(tmp_path)


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    from lit_fed.data import IID

    with pytest.raises(ConfigError, match=r"absent is not a folder; set data.root"):
        _ = ClientPoses(str(tmp_path / "absent")).num_clients
    with pytest.raises(ConfigError, match="holds no client folders"):
        _ = ClientPoses(str(tmp_path)).num_clients
    with pytest.raises(ConfigError, match=r"data.partition is IID, and ClientPoses has a folder per client"):
        ClientPoses(str(tmp_path), partition=IID())
    with pytest.raises(ConfigError, match=r"data.num_clients is 3, and .* has 2 client folders; lower it"):
        ready(folders(tmp_path), num_clients=3)
    with pytest.raises(ConfigError, match=r"data.client_folders is \['a', 'a'\]; it must name"):
        ClientPoses(client_folders=["a", "a"])
    for heights in ((0.0, 40.0), (20.0, float("nan"))):
        with pytest.raises(ConfigError, match=r"data.box_heights is .*; it must be above 0 pixels each"):
            ClientPoses(box_heights=heights)


# ---------------------------------------------------------------------- split


def _split(data: Any, to: Path) -> ClientPoses:
    data.setup()
    write_pose_folders(data, to)
    found = ClientPoses(str(to), **_made(pose_settings_of(data)))
    found.setup()
    return found


def _made(settings: dict[str, Any]) -> dict[str, Any]:
    from lit_fed.poses import PoseAugmentation, Skeleton

    skeleton = {name: tuple(map(tuple, value)) if name in ("flip_pairs", "edges") else tuple(value)
                for name, value in settings["skeleton"].items()}  # fmt: skip
    augmentation = PoseAugmentation(**settings["augmentation"])
    return settings | {"skeleton": Skeleton(**skeleton), "augmentation": augmentation}


def test_drawn_figures_are_the_same_in_folders(tmp_path: Path) -> None:
    drawn = Puppets(samples_per_client=6, test_samples=5, batch_size=4, val_fraction=0.34, augmentation=STILL)
    found = _split(drawn, tmp_path)
    for client in range(3):
        assert found.describe(client)["resolution"] == drawn.describe(client)["resolution"]
        for way in ("val_loader", "test_loader"):
            ones, others = list(getattr(found, way)(client)), list(getattr(drawn, way)(client))
            assert len(ones) == len(others)
            assert all(same(_known(one), _known(other)) for one, other in zip(ones, others, strict=True))
        trained, before = (next(iter(data.train_loader(client, generator()))) for data in (found, drawn))
        assert len(trained["image"]) == len(before["image"]) == 4
        assert [one["image"].shape for one in trained["levels"]] == [one["image"].shape for one in before["levels"]]
    for one, other in zip(found.test_loader(), drawn.test_loader(), strict=True):
        assert same(_known(one), _known(other))


def test_photographs_are_the_same_in_folders(tmp_path: Path) -> None:
    data = keyed(tmp_path / "album", CAMERAS, augmentation=STILL, antialias=True)
    found = _split(data, tmp_path / "folders")
    for client in range(2):
        for way in (lambda data: data.train_loader(client, generator()), lambda data: data.test_loader(client)):  # noqa: B023
            for one, other in zip(way(found), way(data), strict=True):
                assert same(_known(one), _known(other))


def test_the_command_writes_what_a_node_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    monkeypatch.chdir(tmp_path)
    run = ["-c", "configs/papers/raf/runs/puppets.yaml", "--data.samples_per_client", "3", "--data.test_samples", "4"]
    main(["split", *run, "--output", "out"])
    assert (tmp_path / "out" / "client_2" / "images" / "train_000006.png").is_file() or len(
        list((tmp_path / "out" / "client_2" / "images").glob("train_*.png"))
    ) == 3
    text = (tmp_path / "out" / "README.md").read_text()
    assert "`images` and the `.json` files hold the samples of one client" in text
    assert "--client client_0 " in text
    content = yaml.safe_load((tmp_path / "out" / "server" / "config.yaml").read_text())
    assert content["data"]["class_path"] == "ClientPoses"
    monkeypatch.chdir(tmp_path / "out")
    main(["fit", "-c", "server/config.yaml", "--trainer.max_rounds", "1", "--trainer.local_epochs", "1"])
    record = json.loads(next((tmp_path / "out").rglob("partition.json")).read_text())
    assert [row["resolution"] for row in record["clients"].values()] == [[64, 48], [48, 36], [32, 24]]


def test_numbers_of_images_are_the_files_own_where_they_differ(tmp_path: Path) -> None:
    data = ready(folders(tmp_path))
    assert np.unique(data.stored_people("train", np.arange(8)).image_id).tolist() == list(range(8))
