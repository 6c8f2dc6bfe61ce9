"""One scale for a population: bytes and floating-point numbers mean the same, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_fed import Classifier
from lit_fed.data import ArrayFile, ClientArrays
from lit_fed.data.population.census import common_scale, on_scale, scale_of
from lit_fed.errors import ConfigError
from lit_fed.federation.node.node import Node
from lit_fed.federation.server.federate import federate
from lit_fed.federation.transport.grid import MemoryGrid
from lit_fed.methods import FedAvg
from tests.support import trainer

X = np.random.default_rng(0).integers(0, 256, (24, 8, 8), dtype=np.uint8)
X[:, 0, 0], X[:, 0, 1] = 0, 255
UNIT = (X / 255).astype(np.float32)
Y = np.arange(24) % 2


def archive(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "a.npz", **{"x_train": X, "y_train": Y, "x_test": X[:8], "y_test": Y[:8], **arrays})
    return str(folder / "a.npz")


def seen(data: Any, client_id: int | None = None) -> torch.Tensor:
    """What the network sees of test inputs, in their order."""
    return torch.cat([x for x, _ in data.test_loader(client_id)])


def ready(data: Any, *args: Any) -> Any:
    data.setup("fit", *args)
    return data


def _batches(data: Any) -> Iterator[torch.Tensor]:
    for client_id in data.census.clients:
        for x, _ in data.train_loader(client_id, torch.Generator()):
            yield x


@pytest.mark.parametrize("train", [X, UNIT], ids=["bytes", "numbers"])
@pytest.mark.parametrize("test", [X, UNIT], ids=["bytes", "numbers"])
def test_training_and_test_images_mean_the_same_in_every_type(train: Any, test: Any, tmp_path: Path) -> None:
    colour = train[..., None], test[:8, ..., None]
    for x_train, x_test in ((train, test[:8]), colour):
        if train is test is UNIT and x_train.ndim == 3:
            continue  # windows
        path = archive(tmp_path, x_train=x_train, x_test=x_test)
        data = ready(ArrayFile(path, num_clients=2))
        assert data.input_shape == (1, 8, 8)
        torch.testing.assert_close(seen(data)[:, 0], torch.from_numpy(UNIT[:8]), rtol=0, atol=1e-7)
        both = torch.cat(list(_batches(data))).flatten().sort().values
        torch.testing.assert_close(both, torch.from_numpy(UNIT).flatten().sort().values, rtol=0, atol=1e-7)
        expected = {"step": "normalize", "mean": [0.0], "std": [1.0], "max_value": 255.0 if train is test is X else 1.0}
        assert data.preprocessing() == [expected]
        assert data.stored_like() == ((1, 8, 8), "uint8" if train is test is X else "float32")


FLAT = X.reshape(24, 64)


@pytest.mark.parametrize(
    ("arrays", "settings", "message"),
    [
        ({"x_test": X[:8] * 1.0}, {}, "x_test holds float64 from 0 to 255; set data.max_value"),
        ({"x_train": UNIT[..., None], "x_test": X[:8, ..., None] * 1.0}, {}, "x_test holds float64 from 0 to 255"),
        ({"x_train": X[..., None] * 1.0, "x_test": UNIT[:8, ..., None]}, {}, "x_train holds float64 from 0 to 255"),
        ({"x_test": X[:8].astype(np.int64)}, {}, "x_test holds int64 from 0 to 255; set data.max_value"),
        ({"x_test": UNIT[:8] - 0.5}, {}, r"x_test .-0\.5 to 0\.5. holds numbers outside 0 to 1, and .*x_train holds"),
        ({"x_train": UNIT[..., None] * 2 - 1, "x_test": UNIT[:8, ..., None]}, {}, "x_train .-1 to 1. holds .* below 0"),
        ({"x_test": (X[:8] > 99).astype(np.int64)}, {}, "x_test .0 to 1. holds numbers outside 0 to 1"),
        ({"x_test": X[:8] * 1.0}, {"mean": [0.5], "std": [0.5]}, "x_test .* holds numbers outside 0 to 1"),
        ({"x_test": UNIT[:8]}, {"max_value": 255}, "x_test holds float32 from 0 to 1, which data.max_value 255 makes"),
        ({"x_train": FLAT, "x_test": FLAT[:8] * 1.0}, {}, "x_test .* holds numbers outside .* bytes; store both alike"),
        ({"x_train": X[:, None, ..., None].repeat(3, 1)[..., 0], "x_test": X[:8, None].repeat(3, 1)}, {}, "store N×H"),
    ],
)  # fmt: skip
def test_what_stays_ambiguous_is_refused(
    arrays: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        ready(ArrayFile(archive(tmp_path, **arrays), num_clients=2, **settings))


@pytest.mark.parametrize(
    ("arrays", "settings", "factor"),
    [
        ({"x_test": X[:8] * 1.0}, {"max_value": 255}, 1),
        ({"x_train": X * 1.0, "x_test": X[:8]}, {"max_value": 255}, 1),
        ({"x_train": FLAT * 1.0, "x_test": FLAT[:8] * 1.0}, {}, 255),  # features are what they are
        ({"x_train": FLAT, "x_test": UNIT.reshape(24, 64)[:8]}, {}, 1),
    ],
)  # fmt: skip
def test_what_a_setting_says_holds_for_all(
    arrays: dict[str, Any], settings: dict[str, Any], factor: float, tmp_path: Path
) -> None:
    data = ready(ArrayFile(archive(tmp_path, **arrays), num_clients=2, **settings))
    torch.testing.assert_close(seen(data).flatten(), torch.from_numpy(UNIT[:8]).flatten() * factor, rtol=1e-6, atol=0)


def test_a_scale_is_that_of_all_parts_in_any_order() -> None:
    assert common_scale({}) is common_scale({"a": None}) is None
    assert common_scale({"a": "bytes", "b": None}) == "bytes"
    assert common_scale({"a": "bytes", "b": "unit"}) == common_scale({"a": "unit", "b": "bytes"}) == "unit"
    assert common_scale({"a": "unit", "b": "other"}) == "other"
    with pytest.raises(ConfigError, match=r"^b holds numbers outside 0 to 1, and a holds bytes; store both alike"):
        common_scale({"a": "bytes", "c": "bytes", "b": "other"})
    assert common_scale({"a": "signed", "b": "other"}) == "other"
    with pytest.raises(ConfigError, match=r"^c holds numbers below 0, and a holds numbers in 0 to 1 alone; store all"):
        common_scale({"a": "unit", "b": "unit", "c": "signed"})
    assert scale_of(X[:0], "x", True, None, False) == {}
    assert scale_of(UNIT - 1, "x", True, None, False) == {"x (-1 to 0)": "signed"}
    # 51/255 = 1/5
    assert on_scale(np.array([0, 51, 255], np.uint8), "unit").tolist() == [0, np.float32(0.2), 1]
    assert on_scale(np.array([51], np.uint8), "bytes").dtype == np.uint8


# ---------------------------------------------------------------------- a file a client


def client(root: Path, owner: str, x: Any, **more: Any) -> None:
    (root / owner).mkdir(parents=True, exist_ok=True)
    own = {} if owner == "server" else {"x_train": x, "y_train": Y}
    np.savez(root / owner / "data.npz", **{**own, "x_test": x[:8], "y_test": Y[:8], **more})


def population(root: Path, **kwargs: Any) -> ClientArrays:
    settings = {"num_clients": 2, "stored_shape": [1, 8, 8], "num_classes": 2, **kwargs}
    return ClientArrays(root=str(root), **settings)


@pytest.mark.parametrize("order", [(X, UNIT), (UNIT, X)], ids=["bytes first", "numbers first"])
def test_every_file_is_read_by_its_own_type(order: Any, tmp_path: Path) -> None:
    for one, x in enumerate(order):
        client(tmp_path, f"client_{one}", x)
    client(tmp_path, "server", X)
    data = ready(population(tmp_path))
    for client_id in (0, 1, None):
        torch.testing.assert_close(seen(data, client_id)[:, 0], torch.from_numpy(UNIT[:8]), rtol=0, atol=1e-7)
    for batch in _batches(data):
        assert batch.max() == 1


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X * 1.0, r"client_1/data\.npz: x_train holds float64 from 0 to 255; set data\.max_value"),
        (
            UNIT - 0.5,
            r"client_1/data\.npz: x_train \(-0\.5 to 0\.5\) holds numbers outside .*client_0/data\.npz: x_train holds",
        ),
    ],
)
def test_a_file_on_another_scale_is_refused_by_its_name(x: Any, message: str, tmp_path: Path) -> None:
    client(tmp_path, "client_0", X)
    client(tmp_path, "client_1", x)
    with pytest.raises(ConfigError, match=message):
        ready(population(tmp_path))


def test_a_client_with_images_below_0_beside_others_from_0_to_1_is_refused_unless_a_setting_says_so(
    tmp_path: Path,
) -> None:
    client(tmp_path, "client_0", UNIT)
    client(tmp_path, "client_1", 2 * UNIT - 1)
    with pytest.raises(
        ConfigError,
        match=r"client_1/data\.npz: x_train \(-1 to 1\) holds numbers below 0, and .*client_0/data\.npz: x_train "
        r"\(0 to 1\) holds numbers in 0 to 1 alone; store all images on one scale, or set data\.max_value to 1 if",
    ):
        ready(population(tmp_path))
    assert seen(ready(population(tmp_path, max_value=1)), 1).min() == -1
    client(tmp_path, "client_0", 2 * UNIT - 1)
    assert ready(population(tmp_path)).max_value == 1  # all clients alike


def test_features_of_any_range_stand_beside_each_other(tmp_path: Path) -> None:
    client(tmp_path, "client_0", UNIT.reshape(24, 64))
    client(tmp_path, "client_1", UNIT.reshape(24, 64) - 0.5)
    assert seen(ready(population(tmp_path, stored_shape=[64])), 1).min() == -0.5


def test_images_lie_in_any_of_three_layouts(tmp_path: Path) -> None:
    colours = np.random.default_rng(1).integers(0, 256, (24, 4, 5, 3), dtype=np.uint8)
    client(tmp_path, "client_0", colours)
    client(tmp_path, "client_1", colours.transpose(0, 3, 1, 2))
    data = ready(population(tmp_path, stored_shape=[3, 4, 5]))
    assert torch.equal(seen(data, 0), seen(data, 1))
    # Where both layouts have one shape, it is that of `ArrayFile`.
    cube = np.arange(24 * 27, dtype=np.float32).reshape(24, 3, 3, 3) / 1000
    client(tmp_path, "client_0", cube)
    client(tmp_path, "client_1", cube)
    data = ready(population(tmp_path, stored_shape=[3, 3, 3]))
    assert torch.equal(seen(data, 0), torch.from_numpy(cube[:8]).permute(0, 3, 1, 2))


# ---------------------------------------------------------------------- over machines


def federated(folder: Path, stored: tuple[Any, Any], shared: Any = None) -> ClientArrays:
    """Train over two nodes with a client each; the server's data afterwards."""
    for one, x in enumerate(stored):
        client(folder / f"node_{one}", f"client_{one}", x)
    (folder / "server").mkdir()
    if shared is not None:
        client(folder / "server", "server", shared)
    with ExitStack() as stack:
        handlers = {}
        for one in range(2):
            made, model = (
                trainer(folder / f"node_{one}", max_rounds=1),
                Classifier("mlp", num_classes=2, input_shape=(1, 8, 8)),
            )
            data = population(folder / f"node_{one}")
            home = Node(made, model, data, FedAvg(), [one], folder / "states", say=lambda line: None)
            handlers[one + 1] = stack.enter_context(home.at_work()).handle
        made, model = trainer(folder / "server", max_rounds=1), Classifier("mlp", num_classes=2, input_shape=(1, 8, 8))
        data = population(folder / "server")
        federate(MemoryGrid(handlers), made, model, data, FedAvg())
    return data


def test_a_server_prepares_inputs_as_its_nodes_do(tmp_path: Path) -> None:
    for name, stored, shared, max_value in (
        ("bytes, and nothing of its own", (X, X), None, 255.0),
        ("one of each", (X, UNIT), X, 1.0),
        ("numbers", (UNIT, UNIT), X, 1.0),
    ):
        (tmp_path / name).mkdir()
        data = federated(tmp_path / name, stored, shared)
        assert data.preprocessing() == [{"step": "normalize", "mean": [0.0], "std": [1.0], "max_value": max_value}]
        if shared is not None:
            torch.testing.assert_close(seen(data)[:, 0], torch.from_numpy(UNIT[:8]), rtol=0, atol=1e-7)


def test_a_server_refuses_nodes_on_scales_that_cannot_agree(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^client 1 holds numbers outside 0 to 1, and client 0 holds bytes"):
        federated(tmp_path, (X, UNIT - 0.5))
    with pytest.raises(
        ConfigError, match=r"^client 1 holds numbers below 0, and client 0 holds numbers in 0 to 1 alone"
    ):
        federated(tmp_path / "floats", (UNIT, UNIT - 0.5))


def test_a_report_says_nothing_where_the_setting_does(tmp_path: Path) -> None:
    client(tmp_path, "client_0", X)
    assert ready(population(tmp_path), [0]).census.report(0).scale == "bytes"
    told = ready(population(tmp_path, max_value=255.0), [0])
    assert told.census.report(0).scale is None
    told.census.learn({1: replace(told.census.report(0), scale=None)})
    assert told.max_value == 255
