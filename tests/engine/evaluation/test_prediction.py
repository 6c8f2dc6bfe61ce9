"""Prediction files against a direct forward of the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_fed import Classifier, Model, Split
from lit_fed.data import Parts
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.methods import FedAvg
from lit_fed.participation import UniformParticipation
from tests.support import Points, Threes, kept, rows, small_disk, trainer, weights


class Network(Classifier):
    def __init__(self) -> None:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 5))
        super().__init__(network, lambda p: torch.optim.SGD(p, lr=0.5))


class Personal(FedAvg):
    """A shared body and a personal head."""

    def split(self, model: Model, round_idx: int) -> Split:
        head = tuple(name for name in model.parameters if name.startswith("network.2"))
        return Split(tuple(name for name in model.parameters if name not in head), head)


def trained(folder: Path, **kwargs: Any) -> tuple[Any, tuple[Any, Any, Any]]:
    parts = (Network(), Threes(3, test_batch_size=2), Personal())
    made = trainer(folder, **kwargs)
    made.fit(*parts)
    return made, parts


def forward(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """The network written out."""
    hidden = torch.tanh(x @ state["network.0.weight"].T + state["network.0.bias"])
    return hidden @ state["network.2.weight"].T + state["network.2.bias"]


def test_global_model_on_the_shared_test_set(tmp_path: Path) -> None:
    made, parts = trained(tmp_path)
    x = torch.from_numpy(parts[1].load_arrays().test.x)
    logits = forward(weights(made), x)
    made.predict(*parts, output=str(tmp_path / "deep" / "p.csv"))
    made.predict(*parts, output=str(tmp_path / "p.npz"))
    saved = np.load(tmp_path / "p.npz")
    assert set(saved) == {"prediction", "probability", "label"}
    np.testing.assert_array_equal(saved["label"], parts[1].load_arrays().test.y)
    assert saved["prediction"].dtype == np.int64
    np.testing.assert_array_equal(saved["prediction"], logits.argmax(1).numpy())
    np.testing.assert_allclose(saved["probability"], logits.softmax(1).numpy(), rtol=1e-5)
    table = rows(tmp_path / "deep" / "p.csv")
    assert list(table[0]) == ["index", "prediction", *(f"probability_{c}" for c in range(5)), "label"]
    assert [row["index"] for row in table] == [str(i) for i in range(9)]
    assert [row["prediction"] for row in table] == [str(p) for p in saved["prediction"]]  # "3", not "3.0"
    written = np.array([[float(row[f"probability_{c}"]) for c in range(5)] for row in table], dtype=np.float32)
    np.testing.assert_array_equal(written, saved["probability"])  # to the last bit


def test_one_client_with_its_own_state_on_its_own_data(tmp_path: Path) -> None:
    made, parts = trained(tmp_path)
    body = weights(made)
    x = torch.from_numpy(parts[1].load_arrays().test.x)
    predicted = []
    for client_id in range(3):
        output = tmp_path / f"{client_id}.npz"
        made.predict(*parts, client_position=client_id, output=str(output))
        expected = forward(body | kept(made, client_id), x[3 * client_id : 3 * client_id + 3]).softmax(1)
        predicted.append(np.load(output)["probability"])
        np.testing.assert_allclose(predicted[-1], expected.numpy(), rtol=1e-5)
        assert not np.allclose(predicted[-1], forward(body, x[3 * client_id :][:3]).softmax(1))  # not the initial head


def test_from_a_checkpoint_in_a_fresh_trainer(tmp_path: Path) -> None:
    made, parts = trained(tmp_path)
    for client_id in (None, 1):
        made.predict(*parts, client_position=client_id, output=str(tmp_path / "one.csv"), overwrite=True)
        for mode in ("memory", "disk"):
            fresh = trainer(tmp_path, client_store=mode)
            fresh.predict(
                Network(), Threes(3, test_batch_size=2), Personal(), "last",
                None if client_id is None else str(client_id), output=str(tmp_path / "two.csv"), overwrite=True,
            )  # fmt: skip
            assert (tmp_path / "one.csv").read_text() == (tmp_path / "two.csv").read_text()


def test_client_that_never_took_part_uses_the_initial_state(tmp_path: Path) -> None:
    made, parts = trained(tmp_path, max_rounds=1, participation=UniformParticipation(count=1))
    new = next(k for k in range(3) if made.run.federation.store.get(k) is None)
    made.predict(*parts, client_position=new, output=str(tmp_path / "p.npz"))
    state = weights(made) | {
        name: tensor for name, tensor in Network().state_dict().items() if name.startswith("network.2")
    }
    x = torch.from_numpy(parts[1].load_arrays().test.x)[3 * new : 3 * new + 3]
    np.testing.assert_allclose(np.load(tmp_path / "p.npz")["probability"], forward(state, x).softmax(1), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool])
def test_types_are_kept_where_numpy_knows_them(tmp_path: Path, dtype: torch.dtype) -> None:
    class Typed(Network):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.arange(len(batch[0])).add(1 / 3).to(dtype)

    made = trainer(tmp_path, max_rounds=1)
    parts = (Typed(), Points(2), FedAvg())
    made.fit(*parts)
    made.predict(*parts, output=str(tmp_path / "p.npz"))
    made.predict(*parts, output=str(tmp_path / "p.csv"))
    expected = torch.arange(4).add(1 / 3).to(dtype)
    expected = expected.float() if dtype == torch.bfloat16 else expected
    saved = np.load(tmp_path / "p.npz")["output"]
    assert saved.dtype == expected.numpy().dtype
    np.testing.assert_array_equal(saved, expected.numpy())
    assert [float(row["output"]) for row in rows(tmp_path / "p.csv")] == expected.double().tolist()


class Bare(LightningModule):
    """No forward, no predict_step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Forward(Bare):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


class TwoInputs(Bare):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x


def test_without_predict_step_forward_takes_the_inputs_of_a_batch(tmp_path: Path) -> None:
    parts: Any = (Forward(), Threes(2), FedAvg())
    made = trainer(tmp_path, max_rounds=1, protocols=[])
    made.fit(*parts)
    made.predict(*parts, output=str(tmp_path / "p.npz"))
    state, x = weights(made), torch.from_numpy(parts[1].load_arrays().test.x)
    expected = x @ state["layer.weight"].T + state["layer.bias"]
    np.testing.assert_allclose(np.load(tmp_path / "p.npz")["output"], expected.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Bare, r"model Bare has neither predict_step nor forward\(x\), by which it predicts; add one"),
        (
            TwoInputs,
            r"forward of model TwoInputs cannot take the inputs of a batch \(TypeError: .*; add a predict_step",
        ),
    ],
)
def test_a_task_that_cannot_predict_is_refused_in_a_line(tmp_path: Path, task: Any, message: str) -> None:
    parts = (task(), Threes(2), FedAvg())
    made = trainer(tmp_path, max_rounds=1, protocols=[])
    made.fit(*parts)
    with pytest.raises(ConfigError, match=message) as caught:
        made.predict(*parts, output=str(tmp_path / "p.csv"))
    assert "\n" not in str(caught.value)


def test_other_objects_than_the_trained_ones_need_a_checkpoint(tmp_path: Path) -> None:
    made, (model, data, method) = trained(tmp_path)
    for name, parts in {
        "model": (Network(), data, method),
        "datamodule": (model, Threes(3), method),
        "algorithm": (model, data, Personal()),
    }.items():
        with pytest.raises(ConfigError, match=f"{name} is not the object that this trainer trained with"):
            made.test(*parts)
    expected = made.test(model, data, method)  # the trained run is still there
    assert made.test(Network(), Threes(3), Personal(), ckpt_path="last") == pytest.approx(expected)


def test_mistakes(tmp_path: Path) -> None:
    class Odd(Network):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return [batch[0]]

    class NoTest(Threes):
        def load_arrays(self) -> Parts:
            parts = super().load_arrays()
            return Parts(parts.train, parts.test.take(slice(3, None)))

    parts = (Network(), NoTest(3), Personal())
    with pytest.raises(ConfigError, match="this trainer has not trained a model; give ckpt_path='last'"):
        trainer(tmp_path).predict(*parts)
    with pytest.raises(CheckpointError, match=r"has a best\.ckpt; name a checkpoint file"):
        trainer(tmp_path).predict(*parts, "best")
    made = trainer(tmp_path, max_rounds=1)
    made.fit(*parts)
    with pytest.raises(ConfigError, match=r"output is 'p\.txt'; it must be a \.csv, \.npz or \.json file"):
        made.predict(*parts, output="p.txt")
    with pytest.raises(ConfigError, match=r"output is .p\.json., and \w+ writes \.csv and \.npz; choose one"):
        made.predict(*parts, output="p.json")
    for client_id in (3, -1):
        with pytest.raises(ConfigError, match=rf"client_position: there is no client {client_id}; clients are 0 to 2"):
            made.predict(*parts, client_position=client_id)
    with pytest.raises(ConfigError, match="there is no test data to predict on for client 0"):
        made.predict(*parts, client_position=0)
    with pytest.raises(ConfigError, match="predict_step returned a list; it must return a tensor"):
        trainer(tmp_path).predict(Odd(), NoTest(3), Personal(), "last")


@pytest.mark.parametrize("name", ["p.csv", "p.npz"])
def test_a_full_disk_leaves_the_predictions_before_whole(tmp_path: Path, name: str) -> None:
    made, parts = trained(tmp_path, max_rounds=1)
    output = tmp_path / "out" / name
    made.predict(*parts, output=str(output))
    before = output.read_bytes()
    with small_disk(len(before) // 2), pytest.raises(ConfigError) as error:
        made.predict(*parts, output=str(output), overwrite=True)
    assert str(error.value).startswith(f"cannot write {output}: ")
    assert str(error.value).endswith("; change output")
    assert output.read_bytes() == before
    assert list(output.parent.iterdir()) == [output]


def test_a_file_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    made, parts = trained(tmp_path, max_rounds=1)
    (tmp_path / "mine.csv").write_text("mine")
    (tmp_path / "link.csv").symlink_to("mine.csv")
    (tmp_path / "nowhere.csv").symlink_to("gone")
    (tmp_path / "folder.csv").mkdir()
    for name in ("mine.csv", "link.csv", "nowhere.csv"):
        with pytest.raises(ConfigError, match=rf"{name} exists; name another file with output, or replace it"):
            made.predict(*parts, output=str(tmp_path / name))
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"folder\.csv is a folder; name another file with output"):
            made.predict(*parts, output=str(tmp_path / "folder.csv"), overwrite=overwrite)
    assert (tmp_path / "mine.csv").read_text() == "mine"
    made.predict(*parts, output=str(tmp_path / "link.csv"), overwrite=True)
    assert (tmp_path / "link.csv").is_symlink()
    assert len(rows(tmp_path / "mine.csv")) == 9


def test_a_position_in_place_of_a_name_is_refused_in_python_too(tmp_path: Path) -> None:
    made, parts = trained(tmp_path, max_rounds=1)
    with pytest.raises(ConfigError, match=r"client is 1; it must be a text or None"):
        made.predict(*parts, client=1)
    made.predict(*parts, client="1", output=str(tmp_path / "name.csv"))
    made.predict(*parts, client_position=1, output=str(tmp_path / "position.csv"))
    assert (tmp_path / "name.csv").read_bytes() == (tmp_path / "position.csv").read_bytes()


def test_the_batches_come_back_in_order_as_from_lightning(tmp_path: Path) -> None:
    made, parts = trained(tmp_path)
    arrays = parts[1].load_arrays().test
    loader = DataLoader(TensorDataset(torch.from_numpy(arrays.x), torch.from_numpy(arrays.y)), batch_size=2)
    plain = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_checkpointing=False)
    theirs = plain.predict(parts[0], loader)
    ours = made.predict(*parts)
    assert theirs is not None
    assert [len(batch["prediction"]) for batch in ours] == [2, 2, 2, 2, 1]
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        assert own.keys() == other.keys()
        for name in other:
            torch.testing.assert_close(own[name], other[name], rtol=0, atol=0)
    assert not list(tmp_path.glob("*.csv"))


def test_what_predict_step_returns_comes_back_by_its_names(tmp_path: Path) -> None:
    class Telling(Network):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return {"of": torch.full((len(batch[0]),), batch_idx), "logits": self.network(batch[0])}

    parts = (Telling(), Threes(3, test_batch_size=4), FedAvg())
    made = trainer(tmp_path)
    made.fit(*parts)
    x = torch.from_numpy(parts[1].load_arrays().test.x)
    found = made.predict(*parts)
    assert [batch["of"].tolist() for batch in found] == [[0] * 4, [1] * 4, [2]]  # nine samples in batches of four
    torch.testing.assert_close(torch.cat([batch["logits"] for batch in found]), forward(weights(made), x))
