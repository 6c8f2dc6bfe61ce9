"""Tables with missing numbers and categories, against pandas and scikit-learn on the pooled rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder

from lit_fed import Classifier, FederatedTrainer, export_network, load_network
from lit_fed.data import FederatedDataModule, Table
from lit_fed.errors import ConfigError
from tests.support import assert_same, fit, run_cli, saved_weights, weights

pandas = pytest.importorskip("pandas")

WARDS = ["icu", "surgery", "ward 7"]
FEATURES = ["age", "ward", "dose", "stay"]
ROWS = 120


def patients(folder: Path, name: str = "patients.csv") -> Path:
    """Three sites; ages and doses have gaps in several spellings, wards have gaps and a level that no setting names."""
    drawn = np.random.default_rng(7)
    frame = pandas.DataFrame(
        {
            "site": drawn.choice(["a", "b", "c"], ROWS, p=[0.5, 0.3, 0.2]),
            "age": drawn.integers(20, 90, ROWS).astype(str),
            "ward": drawn.choice([*WARDS, "cellar"], ROWS),
            "dose": [f"{dose:.3f}" for dose in drawn.lognormal(1, 1, ROWS)],
            "stay": drawn.integers(1, 20, ROWS).astype(str),
            "ill": drawn.choice(["no", "yes"], ROWS, p=[0.7, 0.3]),
        }
    )
    for column, gap, every in (("age", "", 9), ("dose", "NA", 7), ("dose", "null", 11), ("ward", "", 13)):
        frame.loc[::every, column] = gap
    path = folder / name
    frame.to_csv(path, index=False)
    return path


def table(path: Path, **kwargs: Any) -> Table:
    settings: dict[str, Any] = {"impute": "median", "levels": {"ward": WARDS}} | kwargs
    return Table(str(path), "ill", FEATURES, "site", **settings)


def ready(path: Path, **kwargs: Any) -> Table:
    data = table(path, **kwargs)
    data.setup()
    return data


def frame_of(path: Path) -> Any:
    return pandas.read_csv(path)  # to which all spellings above are missing


def rows_of(data: FederatedDataModule, path: Path) -> tuple[Any, Any]:
    """Training and test rows as pandas has them, found by their stays, ages and doses."""
    frame = frame_of(path)
    keys = frame[["age", "dose", "stay"]].to_numpy()
    found = []
    for subset, count in (("train", data._x["train"]), ("test", data._x["test"])):  # type: ignore[attr-defined]
        x, _ = data.stored(subset, np.arange(len(count)))  # type: ignore[attr-defined]
        places = [np.flatnonzero([np.array_equal(key, row, equal_nan=True) for key in keys]) for row in x[:, [0, 2, 3]]]
        assert all(len(place) == 1 for place in places)
        found.append(frame.iloc[[int(place[0]) for place in places]])
    return found[0], found[1]


def seen(loader: Any) -> torch.Tensor:
    return torch.cat([x for x, _ in loader])


def test_medians_indicators_and_levels_are_those_of_pandas_and_scikit_learn(tmp_path: Path) -> None:
    """Over all clients' training rows; means and deviations are those of the numbers that are there."""
    path = patients(tmp_path)
    data = ready(path)
    train, test = rows_of(data, path)
    numbers = ["age", "dose", "stay"]
    imputer = SimpleImputer(strategy="median", add_indicator=True).fit(train[numbers])
    filled = imputer.transform(test[numbers])  # ages, doses, stays; gaps of ages, gaps of doses
    mean, std = train[numbers].mean(), train[numbers].std(ddof=0)
    scaled = (filled[:, :3] - mean.to_numpy()) / std.to_numpy()
    known = OneHotEncoder(categories=[WARDS], handle_unknown="ignore", sparse_output=False)
    one_hot = known.fit(pandas.DataFrame({"ward": WARDS})).transform(test[["ward"]].fillna("?"))
    other = ~test["ward"].isin(WARDS)
    # The numbers in order; then by column the gap of age, the levels and others of ward, the gap of dose.
    wanted = np.column_stack([scaled, filled[:, 3], one_hot, other, filled[:, 4]])
    assert other.sum() > 3
    assert data.input_shape == (9,)
    torch.testing.assert_close(seen(data.test_loader()), torch.tensor(wanted, dtype=torch.float32))
    encode, normalize = data.preprocessing() or []
    assert (encode["features"], encode["levels"]) == (FEATURES, [None, WARDS, None, None])
    assert encode["fill"] == [train["age"].median(), None, train["dose"].median(), None]  # stays have no gap
    assert normalize["mean"][3:] == [0.0] * 6


def test_given_numbers_are_in_the_place_of_medians_and_a_named_column_has_an_indicator(tmp_path: Path) -> None:
    path = tmp_path / "small.csv"
    path.write_text("x,y,kind\n1,2,a\n,4,b\n3,6,a\n5,8,b\n")
    given = {"x": 7.0, "y": 0.0}
    data = Table(str(path), "kind", ["x", "y"], impute=given, standardise=False, test_path=str(path), num_clients=1)
    data.setup()
    assert seen(data.test_loader()).tolist() == [[1, 2, 0, 0], [7, 4, 1, 0], [3, 6, 0, 0], [5, 8, 0, 0]]


def test_a_level_may_be_called_none_and_a_whole_number_is_a_level_in_both_spellings(tmp_path: Path) -> None:
    path = tmp_path / "small.csv"
    path.write_text("code,habit,kind\n7,some,a\n7.0,None,b\n,none ,a\n8,,b\n")
    levels = {"code": ["7"], "habit": ["none", "some"]}
    data = Table(str(path), "kind", levels=levels, test_path=str(path), num_clients=1)
    data.setup()
    # 7, 7, other, other; some, other, none, other: a level is spelt as in the file
    assert seen(data.test_loader()).tolist() == [[1, 0, 0, 1, 0], [1, 0, 0, 0, 1], [0, 1, 1, 0, 0], [0, 1, 0, 0, 1]]


def test_new_rows_are_encoded_as_in_training_and_a_new_gap_is_refused(tmp_path: Path) -> None:
    path = patients(tmp_path)
    data = ready(path)
    new = tmp_path / "new.csv"
    new.write_text("age,ward,dose,stay\n,attic,2.5,3\n")
    encode, normalize = data.preprocessing() or []
    (row,) = seen([(x, None) for x in data.new_inputs(new).loader]).tolist()
    wanted = [encode["fill"][0], 2.5, 3.0]
    assert row[:3] == pytest.approx(
        [(x - m) / s for x, m, s in zip(wanted, normalize["mean"], normalize["std"], strict=False)], rel=1e-6
    )
    assert row[3:] == [1, 0, 0, 0, 1, 0]
    new.write_text("age,ward,dose,stay\n30,icu,2.5,\n")
    with pytest.raises(ConfigError, match=r"new.csv, line 2: stay is empty, not a number; set data.impute"):
        data.new_inputs(new)


def trained(folder: Path, path: Path, **kwargs: Any) -> FederatedTrainer:
    data = table(path, batch_size=16)
    torch.manual_seed(0)
    model = Classifier("mlp", num_classes=2, input_shape=(9,), network_args={"hidden": [4]})
    return fit(folder, model, data, max_rounds=kwargs.pop("max_rounds", 2), **kwargs)


def test_an_exported_network_takes_rows_with_gaps_and_gives_the_data_modules_inputs(tmp_path: Path) -> None:
    made = trained(tmp_path, patients(tmp_path))
    (run,) = (tmp_path / "lightning_logs").glob("version_*")
    data = made.run.federation.data
    stored, _ = data.stored("test", np.arange(20))  # type: ignore[attr-defined]
    assert np.isnan(stored).any()
    network = Classifier("mlp", num_classes=2, input_shape=(9,), network_args={"hidden": [4]}).network
    deployed = load_network(run / "checkpoints" / "last.ckpt", network)
    inputs = deployed.preprocessing(torch.from_numpy(stored))
    assert torch.equal(inputs, seen(data.test_loader())[:20])
    done = export_network(run / "checkpoints" / "last.ckpt", tmp_path / "exported", network)
    assert "model.pt2" in done.files, done.lacking
    program = torch.export.load(tmp_path / "exported" / "model.pt2").module()
    torch.testing.assert_close(program(torch.from_numpy(stored)), deployed.network(inputs))
    assert "ward 7" in (tmp_path / "exported" / "MODEL_CARD.md").read_text()


def test_a_resumed_run_ends_in_the_same_weights(tmp_path: Path) -> None:
    path = patients(tmp_path)
    whole = trained(tmp_path / "whole", path, max_rounds=3)
    trained(tmp_path / "parts", path, max_rounds=1)
    resumed = trained(tmp_path / "parts", path, max_rounds=3, ckpt_path="last")
    assert_same(weights(whole), weights(resumed))


@pytest.mark.long
def test_two_processes_end_in_the_weights_of_one(tmp_path: Path) -> None:
    path = patients(tmp_path)
    words = [
        *("fit", "--data", "Table", "--data.path", path, "--data.target", "ill", "--data.client", "site"),
        *("--data.features", str(FEATURES), "--data.impute", "median", "--data.levels", str({"ward": WARDS})),
        *("--model", "Classifier", "--model.network", "mlp", "--algorithm", "FedAvg", "--trainer.max_rounds", "2"),
        *("--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"),
    ]
    found = []
    for count in ("1", "2"):
        (tmp_path / count).mkdir()
        done = run_cli(*words, "--trainer.devices", count, cwd=tmp_path / count)
        assert done.returncode == 0, done.stderr
        found.append(saved_weights(tmp_path / count / "lightning_logs" / "version_0"))
    assert_same(*found)


GAPS = "x,when,ward,y\n1,2024-01-30,icu,a\n,2024-02-01,ward,b\n2,2024-03-07,icu,a\n3,2024-04-01,icu,b\n"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a gap": ({"features": ["x"]}, r"line 3: x is empty, not a number; set data.impute to median, or to a number"),
    "another's gap": ({"features": ["x", "ward"], "impute": {"ward": 1.0}}, "set data.impute to median"),
    "a category": ({"features": ["ward"]}, r"ward holds texts, such as 'icu'.*its levels in data.levels"),
    "a date": ({"features": ["when"]}, r"when holds dates, such as '2024-01-30'; write a number in their place"),
    "a double": ({"features": ["ward"], "levels": {"ward": ["icu", "icu"]}}, r"data.levels.ward is .*each once"),
    "a double in spaces": ({"features": ["ward"], "levels": {"ward": ["icu", " icu"]}}, "each once"),
    "no level": ({"features": ["ward"], "levels": {"ward": []}}, "name one level or more"),
    "an empty level": ({"features": ["ward"], "levels": {"ward": ["icu", ""]}}, "no empty one"),
    "not finite": ({"features": ["x"], "impute": {"x": float("nan")}}, "data.impute.x is nan; it must be at least"),
    "too large": ({"features": ["x"], "impute": {"x": 1e300}}, r"data.impute.x is 1e\+300; it must be"),
    "another word": ({"features": ["x"], "impute": "mean"}, "impute"),
    "no feature": ({"features": ["x"], "impute": {"z": 1.0}}, "data.impute names 'z', which is not in data.features"),
    "both": (
        {"features": ["x"], "impute": {"x": 1.0}, "levels": {"x": ["1"]}},
        "data.levels names 'x', which is not in data.features, or in both",
    ),
    "the target": ({"features": ["x"], "levels": {"y": ["a", "b"]}}, "data.levels names 'y', which is not in"),
    "a scale of categories": (
        {
            "features": ["x", "ward"],
            "impute": "median",
            "levels": {"ward": ["icu"]},
            "mean": [1, 1],
            "std": [1, 1],
            "test_fraction": 0.5,
        },
        "data.mean has 2 values for 1 features that are numbers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_setting_covers_is_refused_with_the_setting(case: str, tmp_path: Path) -> None:
    settings, line = REFUSED[case]
    path = tmp_path / "gaps.csv"
    path.write_text(GAPS)
    with pytest.raises(ConfigError, match=line) as error:
        Table(str(path), "y", num_clients=2, **settings).setup()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dates", ["30.1.2024,1.12.2023", "2024-01-30T10:00,2023/5/1", "1/30/24,2/28/24 10:15"])
def test_dates_are_known_in_several_spellings(dates: str, tmp_path: Path) -> None:
    path = tmp_path / "dates.csv"
    path.write_text("when,y\n" + "\n".join(f"{date},{y}" for y, date in zip("ab", dates.split(","), strict=True)))
    with pytest.raises(ConfigError, match="when holds dates"):
        Table(str(path), "y", ["when"], num_clients=1).setup()


def test_a_column_without_any_number_has_no_median(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("x,z,y\n" + "".join(f"{i}.5,NA,{'ab'[i % 2]}\n" for i in range(10)))
    with pytest.raises(ConfigError, match="z has no number in the training rows"):
        Table(str(path), "y", ["x", "z"], impute="median", num_clients=2).setup()


def test_privacy_refuses_medians_over_all_clients_and_takes_given_numbers(tmp_path: Path) -> None:
    path = patients(tmp_path)
    given = {"class_names": ["no", "yes"], "standardise": False}
    assert "data.impute takes medians" in (table(path, **given).pooled() or "")
    assert table(path, impute={"age": 50, "dose": 2}, **given).pooled() is None


def test_parquet_is_read_as_csv_is_gaps_included(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = patients(tmp_path)
    frame_of(path).to_parquet(tmp_path / "patients.parquet")
    a, b = ready(path), ready(tmp_path / "patients.parquet")
    assert a.preprocessing() == b.preprocessing()
    assert torch.equal(seen(a.test_loader()), seen(b.test_loader()))
