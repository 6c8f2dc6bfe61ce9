"""`lit_fed.poses.KeypointAP` by hand, and beside `pycocotools`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_fed.errors import ConfigError
from lit_fed.poses import KeypointAP, KeypointEstimator

SIGMAS = [0.1, 0.1, 0.1]


def persons(*offsets: float, image: Tensor | None = None) -> dict[str, Tensor]:
    """A person an offset, whose three joints are each found that far off; areas of 100² pixels."""
    count = len(offsets)
    truth = torch.tensor([[10.0, 20.0], [110.0, 30.0], [60.0, 90.0]]).expand(count, 3, 2)
    return {
        "predicted": truth + torch.tensor(offsets)[:, None, None] * torch.tensor([0.6, 0.8]),
        "scores": torch.linspace(0.9, 0.5, count)[:, None].expand(count, 3),
        "keypoints": truth,
        "visible": torch.ones(count, 3),
        "area": torch.full((count,), 1e4),
        "image_id": torch.arange(count) if image is None else image,
    }


def off(similarity: float) -> float:
    """How far off joints of σ = 0.1 are at a similarity: exp(−d²/(2·100²·0.2²)) = s."""
    return math.sqrt(-2 * 1e4 * 0.04 * math.log(similarity))


def ap(**kwargs: Any) -> float:
    return statistic("ap", **kwargs)


def statistic(name: Any, **kwargs: Any) -> float:
    metric = KeypointAP(3, SIGMAS, name)
    metric.update(**kwargs)
    return float(metric.compute())


def test_by_hand() -> None:
    assert ap(**persons(0.0, 0.0)) == pytest.approx(100)
    # A similarity of .77 is enough for .5, .55, .6, .65, .7 and .75, six thresholds of ten.
    assert ap(**persons(off(0.77))) == pytest.approx(60)
    assert ap(**persons(off(0.49))) == 0


def test_single_similarities_and_recall_by_hand() -> None:
    # Of two persons one is as similar as .77, the other is not found: at .5 and at .75 half of all are found, the
    # surest first: of 101 recalls the first 51 have precision 1. Six thresholds of ten have a recall of ½.
    given = persons(off(0.77), off(0.1))
    assert statistic("ap50", **given) == pytest.approx(100 * 51 / 101)
    assert statistic("ap75", **given) == pytest.approx(100 * 51 / 101)
    assert statistic("ar", **given) == pytest.approx(30)
    assert statistic("ap75", **persons(off(0.6))) == 0


def test_numbers_are_those_of_pycocotools() -> None:
    COCO = pytest.importorskip("pycocotools.coco").COCO
    from pycocotools.cocoeval import COCOeval

    rng, count, joints = np.random.default_rng(0), 300, 5
    given = {
        "keypoints": rng.uniform(0, 200, (count, joints, 2)),
        "scores": rng.uniform(0, 1, (count, joints)),
        "visible": (rng.uniform(size=(count, joints)) < 0.7).astype(float),
        "area": rng.uniform(500, 20000, count),
        "image_id": rng.integers(0, 60, count),
    }
    given["visible"][:, 0] = 1
    given["visible"][::4] = 0  # persons without joints, some of whose boxes hold the pose that is found
    given["box"] = np.concatenate([given["keypoints"].min(axis=1) - 20, rng.uniform(20, 200, (count, 2))], axis=1)
    spread = given["area"][:, None, None] ** 0.5 * rng.uniform(0, 0.2, (count, 1, 1))
    given["predicted"] = given["keypoints"] + spread * rng.normal(size=(count, joints, 2))
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    truth = [
        {"id": one + 1, "image_id": int(given["image_id"][one]), "category_id": 1, "iscrowd": 0,
         "keypoints": np.concatenate([given["keypoints"][one], 2 * given["visible"][one][:, None]], 1).ravel().tolist(),
         "num_keypoints": int(given["visible"][one].sum()), "area": given["area"][one],
         "bbox": given["box"][one].tolist()}
        for one in range(count)
    ]  # fmt: skip
    answers = [
        {"image_id": int(given["image_id"][one]), "category_id": 1, "score": float(given["scores"][one].mean()),
         "keypoints": np.concatenate([given["predicted"][one], np.ones((joints, 1))], 1).ravel().tolist()}
        for one in range(count)
    ]  # fmt: skip
    coco = COCO()
    images = [{"id": number} for number in range(60)]
    coco.dataset = {"images": images, "annotations": truth, "categories": [{"id": 1, "name": "person"}]}
    coco.createIndex()
    evaluation = COCOeval(coco, coco.loadRes(answers), "keypoints")
    evaluation.params.kpt_oks_sigmas = np.array([0.05, 0.1, 0.05, 0.1, 0.08])
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    for name, place in (("ap", 0), ("ap50", 1), ("ap75", 2), ("ar", 5)):
        metric = KeypointAP(joints, [0.05, 0.1, 0.05, 0.1, 0.08], name)  # type: ignore[arg-type]
        metric.update(**tensors)
        assert float(metric.compute()) == pytest.approx(100 * evaluation.stats[place], abs=1e-4), name
        assert 5 < float(metric.compute()) < 95


def test_the_ranking_counts() -> None:
    # The surer of two is wrong: at every threshold precision is ½ until half of all are found, nothing after: of the
    # 101 recalls 0, .01 … 1 the first 51 have ½.
    assert ap(**persons(off(0.1), 0.0)) == pytest.approx(100 * 51 / 101 / 2)


def test_invisible_joints_and_persons_of_unknown_area_do_not_count() -> None:
    given = persons(0.0, 0.0, off(0.1))
    given["visible"][0, 1] = 0
    given["predicted"] = given["predicted"].clone()
    given["predicted"][0, 1] += 1000.0
    given["area"][2] = math.nan
    assert ap(**given) == pytest.approx(100)


def test_a_person_without_joints_is_compared_with_its_box_by_hand() -> None:
    # The surer pose is found for a person without visible joints. Its box, from (0, 10) 60×40, grows to −60 … 120 and
    # −30 … 90, which the pose's (10, 20), (110, 30) and (60, 90) lie in: it does not count, and the other is right.
    given = persons(0.0, 0.0, image=torch.tensor([7, 8])) | {"box": torch.tensor([[0.0, 10, 60, 40]]).repeat(2, 1)}
    given["visible"] = given["visible"].clone()
    given["visible"][0] = 0
    assert ap(**given) == pytest.approx(100)
    # Moved so far to the right that (110, 30) alone is beyond, by d: (1 + 1 + s)/3 with s = exp(−d²/(2·100²·0.2²)). At
    # s = .16 this is .72: the pose does not count at .5 … .7, five thresholds of ten, and is wrong at the other five,
    # where precision is ½.
    given["predicted"] = given["predicted"].clone()
    given["predicted"][0, 1, 0] = 120 + off(0.16)
    assert ap(**given) == pytest.approx((5 * 100 + 5 * 50) / 10)
    # Without a box the person is left out, and its pose with it.
    del given["box"]
    assert ap(**given) == pytest.approx(100)
    metric = KeypointAP(3, SIGMAS)
    metric.update(**given)
    assert metric.count == 1


def test_two_persons_of_an_image_are_told_apart() -> None:
    given = persons(0.0, 0.0, image=torch.tensor([7, 7]))
    given["keypoints"] = given["keypoints"].clone()
    given["keypoints"][1] += 500.0
    assert ap(**given) == pytest.approx(51 / 101 * 100)  # the second is not found
    given["predicted"] = given["keypoints"]
    assert ap(**given) == pytest.approx(100)


def test_the_task_measures_in_pixels_of_the_image() -> None:
    class Shifted(torch.nn.Module):
        stride, head = 1, torch.nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return x

    task = KeypointEstimator(Shifted(), num_joints=3, flip_test=False, coco_ap=True, oks_sigmas=SIGMAS, in_channels=3)
    task.log = lambda *args, **kwargs: None  # type: ignore[assignment, method-assign]  # there is no trainer
    keypoints = torch.tensor([[[5.0, 6.0], [9.0, 20.0], [15.0, 11.0]]])
    image = task.codec.encode(keypoints, torch.ones(1, 3), (32, 24))
    batch = {
        "image": image,
        "keypoints": keypoints,
        "visible": torch.ones(1, 3),
        "head_size": torch.ones(1),
        "center": torch.tensor([[300.0, 200.0]]),
        "scale": torch.tensor([4.0]),
        "area": torch.tensor([256.0]),
        "image_id": torch.tensor([12]),
    }
    task.test_step(batch, 0)
    metric = next(iter(task.coco.values()))
    assert isinstance(metric, KeypointAP)
    [truth], [area] = metric.keypoints, metric.area
    # 300 + 4·(5 − 11.5) and 200 + 4·(6 − 15.5); the area grows by 4².
    assert truth[0, 0].tolist() == [274.0, 162.0]
    assert area.tolist() == [4096.0]
    assert float(metric.compute()) == pytest.approx(100)


def test_what_is_missing_is_said() -> None:
    with pytest.raises(ConfigError, match="17 oks_sigmas for 14 joints; give one above 0 for each"):
        KeypointAP(14)
    with pytest.raises(ConfigError, match=r"KeypointAP.statistic is 'map'; it must be"):
        KeypointAP(17, statistic="map")  # type: ignore[arg-type]
