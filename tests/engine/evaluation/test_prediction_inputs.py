"""Predictions on files that are none of the data set's."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lit_fed import Classifier, Regressor, load_network
from lit_fed.command.cli import main
from lit_fed.data import ClientFolders, Digits, Table
from lit_fed.data.population.files import IMAGES, read_x
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from tests.command.support import error_of
from tests.support import rows, trainer

SITES = ("berlin", "ulm")


def plants(folder: Path) -> str:
    """Roses are high, tulips are wide."""
    path = folder / "plants.csv"
    rng = np.random.default_rng(0)
    lines = ["site,kind,high,wide"]
    for i in range(80):
        high, wide = (10.0, 1.0) if i % 3 else (1.0, 10.0)
        kind = "a rose, red" if i % 3 else "tulip"
        lines.append(f'{SITES[i % 2]},"{kind}",{high + rng.normal():.3f},{wide + rng.normal():.3f}')
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def classifier(inputs: int, classes: int = 2) -> Classifier:
    torch.manual_seed(0)
    return Classifier("logistic", num_classes=classes, input_shape=(inputs,))


def trained(folder: Path, module: Any, data: Any) -> tuple[Any, tuple[Any, Any, Any]]:
    made, parts = trainer(folder, max_rounds=5, local_epochs=5), (module, data, FedAvg())
    made.fit(*parts)
    return made, parts


def test_a_table_of_ones_own_with_the_names_of_classes(tmp_path: Path) -> None:
    made, parts = trained(tmp_path, classifier(2), Table(plants(tmp_path), "kind", client="site"))
    (tmp_path / "new.csv").write_text("wide,note,high\n1,x,11\n11,y,1\n0.5,z,9\n", encoding="utf-8")
    made.predict(*parts, output=str(tmp_path / "p.csv"), inputs=str(tmp_path / "new.csv"))
    table = rows(tmp_path / "p.csv")
    probabilities = ["probability_a rose, red", "probability_tulip"]
    assert list(table[0]) == ["index", "prediction", *probabilities, "prediction_name"]
    assert [row["prediction_name"] for row in table] == ["a rose, red", "tulip", "a rose, red"]
    # What is deployed does the same to raw features: columns in the order of training, standardised.
    network = load_network(tmp_path / "lightning_logs/version_0/checkpoints/last.ckpt", classifier(2).network)
    logits = network(torch.tensor([[11.0, 1.0], [1.0, 11.0], [9.0, 0.5]]))
    written = np.array([[float(row[name]) for name in probabilities] for row in table])
    np.testing.assert_allclose(written, logits.softmax(1).detach().numpy(), rtol=1e-5)


def test_targets_of_a_table_come_along_where_it_has_them(tmp_path: Path) -> None:
    path = plants(tmp_path)
    made, parts = trained(tmp_path, classifier(2), Table(path, "kind", client="site"))
    made.predict(*parts, output=str(tmp_path / "p.npz"), inputs=path, client="ulm")
    saved = np.load(tmp_path / "p.npz")
    assert saved["class_names"].tolist() == ["a rose, red", "tulip"]
    assert saved["label"].tolist() == [0 if i % 3 else 1 for i in range(80)]
    made.predict(*parts, output=str(tmp_path / "p.csv"), inputs=path)
    assert rows(tmp_path / "p.csv")[0]["label_name"] == "tulip"
    (tmp_path / "new.csv").write_text("wide,high,kind\n1,11,iris\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"new\.csv: target 'iris' is not a class of the training rows, which have a rose"
    ):
        made.predict(*parts, inputs=str(tmp_path / "new.csv"))


def test_a_regression_on_a_table(tmp_path: Path) -> None:
    path = tmp_path / "houses.csv"
    path.write_text("area,price\n" + "\n".join(f"{i},{2.5 * i}" for i in range(60)), encoding="utf-8")
    torch.manual_seed(0)
    module = Regressor("logistic", lambda p: torch.optim.SGD(p, lr=0.1), num_outputs=1, input_shape=(1,))
    made, parts = trained(tmp_path, module, Table(str(path), "price", ["area"], num_clients=2))
    (tmp_path / "new.csv").write_text("area\n10\n50\n", encoding="utf-8")
    made.predict(*parts, output=str(tmp_path / "p.csv"), inputs=str(tmp_path / "new.csv"))
    table = rows(tmp_path / "p.csv")
    assert list(table[0]) == ["index", "prediction"]
    network = load_network(tmp_path / "lightning_logs/version_0/checkpoints/last.ckpt", module.network)
    expected = network(torch.tensor([[10.0], [50.0]])).flatten().tolist()
    assert [float(row["prediction"]) for row in table] == pytest.approx(expected, rel=1e-5)


def test_arrays_and_images_are_prepared_as_in_training(tmp_path: Path) -> None:
    made, parts = trained(
        tmp_path, Classifier("logistic", num_classes=10, input_shape=(1, 8, 8)), Digits(num_clients=3)
    )
    x = parts[1].load_arrays().test.x[:5]
    np.savez(tmp_path / "new.npz", x=x)
    np.save(tmp_path / "flat.npy", x[:, 0])  # (n, H, W) of one channel
    (tmp_path / "images" / "deeper").mkdir(parents=True)
    for number, image in enumerate(x[:, 0]):
        # White is 16 in the digits and 255 in a file: 16/255 rounds back to the same sixteen shades.
        pixels = np.round(image * (255 / 16)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / ("deeper" if number == 4 else ".") / f"{number}.png")
    made.predict(*parts, output=str(tmp_path / "all.npz"))
    expected = np.load(tmp_path / "all.npz")["probability"][:5]
    for inputs in ("new.npz", "flat.npy"):
        made.predict(*parts, output=str(tmp_path / "p.npz"), inputs=str(tmp_path / inputs), overwrite=True)
        saved = np.load(tmp_path / "p.npz")
        assert set(saved) == {"prediction", "probability"}  # digits are called what they are
        np.testing.assert_allclose(saved["probability"], expected, rtol=1e-5)
    made.predict(*parts, output=str(tmp_path / "p.csv"), inputs=str(tmp_path / "images"))
    table = rows(tmp_path / "p.csv")
    assert [Path(row["file"]).name for row in table] == ["0.png", "1.png", "2.png", "3.png", "4.png"]
    written = [[float(row[f"probability_{c}"]) for c in range(10)] for row in table]
    np.testing.assert_allclose(written, expected, rtol=1e-4)


def test_images_from_folders_have_the_names_of_their_classes_and_clients(tmp_path: Path) -> None:
    for site in SITES:
        for kind, shade in (("dark", 20), ("light", 230)):
            (tmp_path / "data" / site / kind).mkdir(parents=True)
            for number in range(5):
                shaded = np.full((6, 6, 3), shade + number, np.uint8)
                Image.fromarray(shaded).save(tmp_path / "data" / site / kind / f"{number}.png")
    data = ClientFolders(str(tmp_path / "data"), image_size=4)
    made, parts = trained(tmp_path, classifier_of_images(), data)
    assert data.client_names == list(SITES)
    (tmp_path / "new").mkdir()
    Image.fromarray(np.full((9, 7), 250, np.uint8)).save(tmp_path / "new" / "grey.jpg")
    for inputs in (tmp_path / "new", tmp_path / "new" / "grey.jpg"):
        output = str(tmp_path / f"{inputs.name}.csv")
        made.predict(*parts, client="berlin", output=output, inputs=str(inputs))
        (row,) = rows(output)
        assert Path(row["file"]).name == "grey.jpg"
        assert row["prediction_name"] == ["dark", "light"][int(row["prediction"])]
    np.savez(tmp_path / "new.npz", x=np.full((2, 3, 4, 4), 250, np.uint8))
    made.predict(*parts, output=str(tmp_path / "p.npz"), inputs=str(tmp_path / "new.npz"))
    assert np.load(tmp_path / "p.npz")["class_names"].tolist() == ["dark", "light"]


def classifier_of_images() -> Classifier:
    return Classifier("logistic", num_classes=2, in_channels=3, input_shape=(3, 4, 4))


def test_from_the_command_line_by_a_clients_name(tmp_path: Path, capsys: Any) -> None:
    words = ["--model", "Classifier", "--model.network", "logistic", "--algorithm", "FedAvg", "--data", "Table"]
    words += ["--data.path", plants(tmp_path), "--data.target", "kind", "--data.client", "site"]
    words += ["--trainer.max_rounds", "1", "--trainer.default_root_dir", str(tmp_path), "--trainer.logger", "false"]
    main(["fit", *words, "--trainer.enable_progress_bar", "false"])
    run = tmp_path / "lightning_logs" / "version_0"
    (tmp_path / "new.csv").write_text("wide,high\n1,11\n", encoding="utf-8")
    again = ["predict", "-c", str(run / "config.yaml"), "--ckpt_path", str(run / "checkpoints" / "best.ckpt")]
    again += ["--inputs", str(tmp_path / "new.csv"), "--output", str(tmp_path / "p.csv")]
    for client in (["--client", "berlin"], ["--client_position", "0"]):
        main([*again, *client, "--overwrite"])
        assert len(rows(tmp_path / "p.csv")) == 1
    before = (tmp_path / "p.csv").read_bytes()
    assert error_of([*again, "--client", "berlin"], capsys) == (
        f"{tmp_path / 'p.csv'} exists; name another file with --output, or replace it with --overwrite"
    )
    assert (tmp_path / "p.csv").read_bytes() == before
    again.append("--overwrite")
    assert error_of([*again, "--client", "berln"], capsys) == (
        "--client: there is no client named 'berln'; did you mean berlin?"
    )
    assert error_of([*again, "--client", "x"], capsys) == (
        "--client: there is no client named 'x'; clients are berlin, ulm"
    )
    assert error_of([*again, "--client", "0"], capsys) == (
        "--client: there is no client named '0'; clients are berlin, ulm; --client_position takes positions"
    )
    assert error_of([*again, "--client", "ulm", "--client_position", "1"], capsys) == (
        "--client and --client_position are both given; give one of them"
    )
    with open(run / "partition.json", encoding="utf-8") as file:
        assert '"name": "berlin"' in file.read()
    with open(run / "clients.csv", encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert {(row["client_id"], row["client"]) for row in found} == {("0", "berlin"), ("1", "ulm")}


@pytest.mark.parametrize("names", [("01", "02", "03"), ("1", "2", "3"), ("3", "1", "null")])
def test_a_client_whose_name_is_a_number_is_called_by_it(names: tuple[str, ...], tmp_path: Path, capsys: Any) -> None:
    # Client c has the class "of c" alone, so that the labels of its test data say whose they are.
    lines = [f"{name},of {name},{place + n / 100}" for place, name in enumerate(names) for n in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["who,kind,x", *lines]), encoding="utf-8")
    words = ["--model", "Classifier", "--model.network", "logistic", "--algorithm", "FedAvg", "--data", "Table"]
    words += ["--data.path", str(tmp_path / "t.csv"), "--data.target", "kind", "--data.client", "who"]
    words += ["--trainer.max_rounds", "1", "--trainer.default_root_dir", str(tmp_path), "--trainer.logger", "false"]
    main(["fit", *words, "--trainer.enable_progress_bar", "false"])
    again = ["predict", *words, "--ckpt_path", str(tmp_path / "lightning_logs/version_0")]

    def labels(*chosen: str) -> set[str]:
        main([*again, "--output", str(tmp_path / "p.csv"), "--overwrite", *chosen])
        return {row["label_name"] for row in rows(tmp_path / "p.csv")}

    assert [labels("--client", name) for name in names] == [{f"of {name}"} for name in names]
    in_order = sorted(names)
    assert [labels(f"--client_position={place}") for place in range(3)] == [{f"of {name}"} for name in in_order]
    for absent in {"0", "1", "001"} - {*names}:
        assert f"there is no client named {absent!r}; clients are " in error_of([*again, "--client", absent], capsys)


@pytest.mark.parametrize(
    ("stored", "given", "message"),
    [
        # 300 would wrap to 300 − 256 = 44, −1 to 255, 2⁶⁴ − 1 to 255.
        (np.uint8, np.array([[7, 300]]), "sample 0 of x holds 300, and the data set stores uint8, 0 to 255"),
        (np.uint8, np.array([[7, 7], [-1, 7]]), "sample 1 of x holds -1, and the data set stores uint8, 0 to 255"),
        (np.uint8, np.array([[7, 2**64 - 1]], np.uint64), f"holds {2**64 - 1}, and the data set stores uint8"),
        (np.int64, np.array([[7, 2**63]], np.uint64), f"holds {2**63}, and the data set stores int64"),
        (np.float32, np.array([[7], [1e39]]), "sample 1 of x holds 1e+39, and the data set stores float32, up to 3.4"),
        (np.float32, np.array([[7], [np.nan]]), "sample 1 of x holds NaN or infinity; correct or remove it"),
        (np.float16, np.array([[7], [-7e4]]), "sample 1 of x holds -70000, and the data set stores float16"),
        (np.float32, np.array([7, 1e39]), "sample 1 of x holds 1e+39, and"),
    ],
)
def test_no_value_becomes_another_by_casting(stored: Any, given: Any, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", given)
    with pytest.raises(ConfigError) as error:
        read_x(tmp_path / "x.npy", given.shape[1:], np.dtype(stored))
    assert str(error.value).startswith(f"{tmp_path / 'x.npy'}: ")
    assert message in str(error.value)


@pytest.mark.parametrize("given", [np.int64, np.int8, np.uint64, np.uint8])
def test_a_wider_type_with_the_same_values_is_taken(given: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[0, 127]], given))
    assert read_x(tmp_path / "x.npy", (2,), np.dtype(np.uint8)).tolist() == [[0, 127]]


def test_predictions_that_are_nan_are_refused(tmp_path: Path) -> None:
    class Rooting(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.sqrt(batch.flatten(1).min(1).values - 0.5)  # white is 1 here, and √(0 − 0.5) is none

    made, parts = trained(tmp_path, Rooting("logistic", num_classes=10, input_shape=(1, 8, 8)), Digits(num_clients=2))
    x = np.ones((9, 8, 8), np.uint8) * 16
    np.savez(tmp_path / "new.npz", x=x)
    made.predict(*parts, output=str(tmp_path / "p.csv"), inputs=str(tmp_path / "new.npz"))
    x[6, 7, 7] = 0
    np.savez(tmp_path / "new.npz", x=x)
    before = (tmp_path / "p.csv").read_bytes()
    with pytest.raises(ConfigError, match=r"output is NaN for sample 6; the inputs are too large"):
        made.predict(*parts, output=str(tmp_path / "p.csv"), inputs=str(tmp_path / "new.npz"), overwrite=True)
    assert (tmp_path / "p.csv").read_bytes() == before


def test_what_cannot_be_predicted_on_is_said_in_a_line(tmp_path: Path) -> None:
    made, parts = trained(
        tmp_path, Classifier("logistic", num_classes=10, input_shape=(1, 8, 8)), Digits(num_clients=2)
    )
    np.savez(tmp_path / "none.npz", y=np.zeros(3))
    np.savez(tmp_path / "shape.npz", x=np.zeros((3, 9, 9), np.uint8))
    np.savez(tmp_path / "type.npz", x=np.zeros((3, 1, 8, 8), np.float32))
    np.savez(tmp_path / "empty.npz", x=np.zeros((0, 1, 8, 8), np.uint8))
    np.savez(tmp_path / "objects.npz", x=np.array([{}]))
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04")
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"no image")
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    for inputs, message in (
        ("none.npz", "none.npz lacks x; it has y"),
        ("shape.npz", "one input of x has shape (1, 9, 9); it must be (1, 8, 8)"),
        ("type.npz", "x holds float32; it must be uint8"),
        ("empty.npz", "x is empty; give one input or more"),
        ("objects.npz", "objects.npz cannot be read (Object arrays cannot be loaded"),
        ("torn.npz", "torn.npz cannot be read ("),
        ("gone.npz", "gone.npz does not exist; name a file with inputs"),
        ("gone", f"gone does not exist; name a folder of {', '.join(IMAGES)} files, or one of them, with inputs"),
        ("folder", f"folder holds no {', '.join(IMAGES)} files; name another folder with inputs"),
        ("a.txt", "a.txt is not an image; name a folder of .png"),
        ("bad", "a.png cannot be decoded; remove or replace it"),
    ):
        with pytest.raises(ConfigError) as error:
            made.predict(*parts, inputs=str(tmp_path / inputs))
        assert message in str(error.value)
        assert "\n" not in str(error.value)


def test_a_task_that_needs_targets_is_told_that_there_are_none(tmp_path: Path) -> None:
    class Unpacking(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            return self(x)

    made, parts = trained(tmp_path, Unpacking("logistic", num_classes=10, input_shape=(1, 8, 8)), Digits(num_clients=2))
    np.savez(tmp_path / "new.npz", x=np.zeros((3, 8, 8), np.uint8))
    with pytest.raises(
        ConfigError, match=r"predict_step cannot take these inputs \(ValueError: too many values to unpack"
    ):
        made.predict(*parts, inputs=str(tmp_path / "new.npz"))
