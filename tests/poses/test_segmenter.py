"""Segmentation of parts: masks and the union by hand, merged over clients, and RAF's levels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassJaccardIndex

from lit_fed.data import IID
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedRAF
from lit_fed.poses import Puppets, Segmenter
from lit_fed.protocols import ClientTest, GlobalTest
from tests.support import assert_same, fit, rows, weights

NAMES, EDGES = ("neck", "left_hip", "right_hip", "head_top"), ((0, 1), (0, 2), (0, 3))


class Same(nn.Module):
    """Every pixel's class is in the picture's first channel."""

    def forward(self, x: Tensor) -> Tensor:
        return 10 * F.one_hot(x[:, 0].long(), 3).movedim(-1, 1).float()


def person(**changes: Any) -> dict[str, Any]:
    """On 7×7 pixels a neck in the middle, hips below it on both sides, and a head's top above."""
    points = torch.tensor([[[3.0, 3.0], [1.0, 5.0], [5.0, 5.0], [3.0, 0.0]]])
    batch = {"image": torch.zeros(1, 3, 7, 7), "keypoints": points, "visible": torch.ones(1, 4)}
    return batch | {"head_size": torch.tensor([2.0])} | changes


def segmenter(network: nn.Module | None = None, **kwargs: Any) -> Segmenter:
    return Segmenter(network or Same(), skeleton_edges=EDGES, joint_names=NAMES, **kwargs)


def test_masks_by_hand() -> None:
    """Both hips' edges are one class; within .3 · 2 = .6 pixels of a diagonal lie its own pixels alone."""
    made = segmenter(width=0.3)
    assert made.parts == ["background", "hip to neck", "head_top to neck"]
    assert made.masks(person()).tolist()[0] == [
        [0, 0, 0, 2, 0, 0, 0],
        [0, 0, 0, 2, 0, 0, 0],
        [0, 0, 0, 2, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0],  # the neck is on all edges, of which the first counts
        [0, 0, 1, 0, 1, 0, 0],
        [0, 1, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]
    hidden = made.masks(person(visible=torch.tensor([[1.0, 0.0, 1.0, 0.0]])))
    assert hidden.sum() == 3  # the right hip's edge alone
    wide = segmenter(width=0.75).masks(person())[0]  # 1.5 pixels
    assert wide[1].tolist() == [0, 0, 2, 2, 2, 0, 0]


def test_the_union_is_torchmetrics_of_all_pixels() -> None:
    made = segmenter(width=0.3)
    truth = made.masks(person())
    seen = truth.clone()
    seen[0, 0, 3] = 0  # one of the head's three pixels is missed
    batch = person(image=seen[:, None].float().expand(1, 3, 7, 7))
    made.log = lambda name, value, **_: logged.setdefault(name, value)  # type: ignore[method-assign,assignment]
    logged: dict[str, Any] = {}
    made.test_step(batch, 0)
    # Background 41 of 42, hips 5 of 5, head 2 of 3.
    assert float(logged["test/miou"].compute()) == pytest.approx((41 / 42 + 1 + 2 / 3) / 3)
    assert float(logged["test/loss"]) == pytest.approx(float(F.cross_entropy(made(batch["image"]), truth)))


def small(**kwargs: Any) -> Puppets:
    return Puppets(
        resolutions=((32, 24), (24, 16)), clients_per_level=[1, 2], samples_per_client=8, test_samples=12, batch_size=4,
        test_resolutions=[(24, 16)], partition=IID(), **kwargs,
    )  # fmt: skip


def model(data: Puppets) -> Segmenter:
    torch.manual_seed(0)
    facts: Any = {"joint_names": data.joint_names, "skeleton_edges": data.skeleton_edges}
    return Segmenter(input_shape=data.input_shape, network_args={"width": 8, "depth": 1}, **facts)


def test_a_federations_union_is_of_all_clients_pixels(tmp_path: Path) -> None:
    """Beside torchmetrics on the pooled predictions, and the same in two runs, one of them resumed."""
    data = small()
    made = fit(tmp_path / "whole", model(data), data, FedRAF(), max_rounds=2, protocols=[GlobalTest(), ClientTest()])
    half = fit(tmp_path / "half", model(data), small(), FedRAF(), max_rounds=1, protocols=[GlobalTest(), ClientTest()])
    again = fit(
        tmp_path / "half", model(data), small(), FedRAF(), max_rounds=2, protocols=[GlobalTest(), ClientTest()],
        ckpt_path=str(half.log_dir / "checkpoints" / "last.ckpt"),
    )  # fmt: skip
    assert_same(weights(made), weights(again))
    task = model(data)
    task.load_state_dict(weights(made), strict=False)
    task.eval()
    pooled = MulticlassJaccardIndex(len(task.parts))
    with torch.no_grad():
        for batch in data.test_loader(view="24x16"):
            pooled.update(task(batch["image"]).argmax(dim=1), task.masks(batch))
    last = rows(made.log_dir / "metrics.csv")[-1]
    assert float(last["global/miou_24x16"]) == pytest.approx(float(pooled.compute()), abs=1e-6)


def test_distillation_reaches_the_lower_resolutions(tmp_path: Path) -> None:
    data = small()
    plain, distilled = (
        fit(tmp_path / str(place), model(data), small(), method, max_rounds=1)
        for place, method in enumerate((FedAvg(weighting="uniform"), FedRAF(alpha=1.0)))
    )
    assert float(rows(distilled.log_dir / "metrics.csv")[-1]["train/raf"]) > 0
    assert any(not torch.equal(one, weights(distilled)[name]) for name, one in weights(plain).items())


def test_features_are_the_means_of_a_map_and_are_pictured() -> None:
    class Maps(Same):
        def forward_features(self, x: Tensor) -> Tensor:
            return x

    made = segmenter(Maps())
    images = torch.tensor([[[1.0, 3.0]], [[0.0, 5.0]]])[None]  # two channels with means 2 and 2.5
    assert made.test_features(person(image=images)).tolist() == [[2.0, 2.5]]
    batches = {name: person(image=torch.randn(20, 2, 2, 1)) for name in ("32x24", "64x48")}
    assert list(made.test_figures(batches)) == ["features"]
    assert segmenter().test_figures(batches) == {}, "a network without a map"
    with pytest.raises(ConfigError, match="network Same needs a forward_features that returns a map"):
        segmenter().test_features(person())


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"skeleton_edges and model\.joint_names"):
        Segmenter(Same())
    with pytest.raises(ConfigError, match=r"model\.width"):
        segmenter(width=0.0)
