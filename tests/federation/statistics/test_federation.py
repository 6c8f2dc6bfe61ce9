"""Statistics of a population whose clients are all here, against pandas on the pooled rows."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lit_fed.data import ArrayFile, ClientFolders, CSVText, Digits, FederatedDataModule, Table
from lit_fed.errors import ConfigError
from lit_fed.federation.statistics.federation import first_question, simulated
from lit_fed.federation.statistics.report import Statistics
from lit_fed.federation.statistics.site import columns_of

pandas = pytest.importorskip("pandas")

ROWS, FEATURES = 240, ["age", "dose", "flag"]


def write_table(folder: Path, missing: bool = True) -> Path:
    """Three sites of unequal sizes, with numbers of very different sizes, and cells without a value."""
    drawn = np.random.default_rng(3)
    age, dose = drawn.integers(20, 90, ROWS), 1e6 + drawn.normal(0, 1, ROWS)
    flag, ill, site = (
        drawn.integers(0, 2, ROWS),
        drawn.integers(0, 2, ROWS),
        drawn.choice(["a", "b", "c"], ROWS, p=[0.6, 0.3, 0.1]),
    )
    lines = ["age,dose,flag,ill,site"]
    for row in range(ROWS):
        told = "" if missing and row % 17 == 0 else "NA" if missing and row % 29 == 0 else str(age[row])
        lines.append(
            f"{told},{dose[row]!r},{flag[row]},{'yes' if ill[row] else 'no'},{site[row]}".replace(
                "np.float64(", ""
            ).replace(")", "")
        )
    path = folder / "patients.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def table(path: Path, **kwargs: Any) -> Table:
    return Table(str(path), target="ill", features=FEATURES, client="site", **kwargs)


def taken(data: FederatedDataModule, bins: int = 8, least: int = 1, ranges: Any = None, **kwargs: Any) -> Statistics:
    data.keeps_missing = True  # before anything is read
    question = first_question(columns_of(data), bins, least, ranges, None)
    data.setup()
    return simulated(data, question, **kwargs)


def rows_of(data: Table, client: int | None = None) -> Any:
    """The training rows as pandas has them."""
    cut = data._ready.train
    indices = np.concatenate([cut[one] for one in range(data.num_clients)]) if client is None else cut[client]
    frame = pandas.DataFrame(data.stored("train", indices)[0].astype(np.float64), columns=FEATURES)
    frame["ill"] = data.stored("train", indices)[1]
    return frame


def test_all_figures_are_those_of_pandas_on_the_pooled_rows(tmp_path: Path) -> None:
    """Also by client. NumPy's histogram; variances as of a population, ``ddof=0``."""
    data = table(write_table(tmp_path))
    found = taken(data).as_dict()
    assert list(found["clients"]) == ["a", "b", "c"]
    low_high = rows_of(data)[FEATURES].agg(["min", "max"])
    for row, frame in [
        (found["all"], rows_of(data)),
        *((found["clients"][name], rows_of(data, one)) for one, name in enumerate("abc")),
    ]:
        assert row["samples"] == len(frame)
        assert row["classes"] == [int((frame["ill"] == label).sum()) for label in (0, 1)]
        for column, name in zip(row["columns"], FEATURES, strict=True):
            values = frame[name]
            assert (column["name"], column["role"]) == (name, "input")
            assert (column["count"], column["missing"]) == (values.count(), values.isna().sum())
            assert (column["minimum"], column["maximum"]) == (values.min(), values.max())
            assert column["mean"] == pytest.approx(values.mean(), rel=1e-12)
            assert column["variance"] == pytest.approx(values.var(ddof=0), rel=1e-9, abs=1e-12)
            counts, _ = np.histogram(values.dropna(), 8, tuple(low_high[name]))
            assert column["cells"] == counts.tolist()
            assert (column["below"], column["above"]) == (0, 0)
            for bound in column["quantiles"]:
                true = np.quantile(values.dropna(), bound["q"], method="inverted_cdf")
                assert bound["low"] <= true <= bound["high"]
                assert bound["low"] <= bound["value"] <= bound["high"]
                assert bound["high"] - bound["low"] == pytest.approx(
                    (low_high[name]["max"] - low_high[name]["min"]) / 8
                )
    assert found["all"]["columns"][0]["missing"] > 10


def test_a_variance_far_from_zero_is_exact(tmp_path: Path) -> None:
    """Doses are 1e6 ± 1: in float64 the mean of squares minus the square of the mean would be noise."""
    data = table(write_table(tmp_path))
    (dose,) = [column for column in taken(data).as_dict()["all"]["columns"] if column["name"] == "dose"]
    assert dose["variance"] == pytest.approx(np.var(rows_of(data)["dose"].to_numpy()), rel=1e-6)


def test_pixels_by_channel_on_the_scale_of_data_mean(tmp_path: Path) -> None:
    """Bytes of two colours are divided by 255, as `data.mean` and `data.std` are."""
    x = np.random.default_rng(0).integers(0, 256, (60, 5, 4, 2), dtype=np.uint8)
    y = np.arange(60) % 3
    np.savez(tmp_path / "images.npz", x_train=x[:50], y_train=y[:50], x_test=x[50:], y_test=y[50:])
    found = taken(ArrayFile(str(tmp_path / "images.npz"), num_clients=4), bins=10).as_dict()["all"]
    assert [column["name"] for column in found["columns"]] == ["channel 0", "channel 1"]
    for channel, column in enumerate(found["columns"]):
        pixels = x[:50, ..., channel] / 255
        assert column["count"] == 50 * 20
        assert column["mean"] == pytest.approx(pixels.mean(), rel=1e-14)
        assert column["variance"] == pytest.approx(pixels.var(), rel=1e-12)
        assert column["cells"] == np.histogram(pixels, 10, (pixels.min(), pixels.max()))[0].tolist()
    assert found["classes"] == np.bincount(y[:50]).tolist()


def test_neither_batches_nor_clients_change_a_bit(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    whole = taken(table(path)).as_dict()["all"]
    assert taken(table(path, test_batch_size=7)).as_dict()["all"] == whole
    assert taken(table(path), by_client=False).as_dict() == {**taken(table(path)).as_dict(), "clients": {}}


def test_given_ranges_take_one_pass_and_count_what_is_outside(tmp_path: Path) -> None:
    data = table(write_table(tmp_path))
    passes = []
    loader = data.stored_loader

    def counted(client_id: int) -> Any:
        passes.append(client_id)
        return loader(client_id)

    data.stored_loader = counted  # type: ignore[method-assign]
    found = taken(data, bins=4, ranges={"age": [30, 70], "*": [0, 2e6]}).as_dict()["all"]["columns"][0]
    ages = rows_of(data)["age"].dropna()
    assert passes == [0, 1, 2]
    assert (found["below"], found["above"]) == ((ages < 30).sum(), (ages > 70).sum())
    assert found["cells"] == np.histogram(ages, 4, (30, 70))[0].tolist()


def test_targets_of_a_regression_are_columns(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("a,b\n" + "\n".join(f"{row},{row * 0.5}" for row in range(40)) + "\n")
    found = taken(Table(str(path), target="b", features=["a"], num_clients=2)).as_dict()["all"]
    assert [(column["name"], column["role"]) for column in found["columns"]] == [("a", "input"), ("b", "target")]
    assert found["classes"] is None


@pytest.mark.parametrize(
    ("kwargs", "line"),
    [
        ({"bins": 0}, "--bins is 0; it must be"),
        ({"bins": 1001}, "--bins is 1001; it must be"),
        ({"least": 0}, "--least is 0; it must be at least 1"),
        ({"ranges": {"ages": [0, 1]}}, "--ranges names 'ages', which is not a column; the data have age, dose, flag"),
        ({"ranges": {"age": 3}}, "--ranges.age is 3; give the least and the largest value"),
        ({"ranges": {"age": [3]}}, "--ranges.age is [3]; give"),
        ({"ranges": {"age": [9, 3]}}, "--ranges.age is [9, 3]; give"),
        ({"ranges": {"age": [3, 3]}}, "--ranges.age is [3, 3]; give"),
        ({"ranges": {"age": [0, float("inf")]}}, "--ranges.age is [0, inf]; give"),
        ({"ranges": {"age": [0, "9"]}}, "--ranges.age is [0, '9']; give"),
        ({"ranges": {"age": [0, True]}}, "--ranges.age is [0, True]; give"),
        ({"least": 5}, "--ranges lacks 'age'; with --least 5 a minimum would be a single sample's value"),
    ],
)
def test_bad_settings_end_in_one_line(tmp_path: Path, kwargs: Any, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        taken(table(write_table(tmp_path)), **kwargs)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_the_table_is_readable(tmp_path: Path) -> None:
    lines = taken(table(write_table(tmp_path))).text().split("\n")
    assert lines[0].endswith("training samples of shape 3, of 3 clients; figures are exact")
    assert max(map(len, lines)) <= 120
    assert any(line.startswith("age ") for line in lines)


def test_memory_is_that_of_a_batch() -> None:
    """Of 72 batches no more than 3 are referenced at a time."""
    import weakref

    data = Digits(num_clients=2, test_batch_size=20)
    data.setup()
    loader, alive = data.stored_loader, list[Any]()

    def watched(client: int) -> Any:
        for x, y in loader(client):
            assert sum(one() is not None for one in alive) <= 3
            batch = x.clone()  # the loader cuts its own batches from larger blocks
            alive.append(weakref.ref(batch))
            yield batch, y

    data.stored_loader = watched  # type: ignore[assignment, method-assign]
    simulated(data, first_question(columns_of(data), 10, 1, None, None))
    assert len(alive) > 20


def test_sizes_of_image_files(tmp_path: Path) -> None:
    """Of the files, not of the images that a network sees: heights 4, 6 and 8, widths twice that."""
    for client, sides in (("a", (4, 6)), ("b", (8,))):
        for label in ("x", "y"):
            (tmp_path / client / label).mkdir(parents=True)
            for side in sides:
                for copy in range(5):
                    picture = Image.fromarray(np.full((side, 2 * side, 3), 51 * copy, np.uint8))
                    picture.save(tmp_path / client / label / f"{side}_{copy}.png")
    data = ClientFolders(root=str(tmp_path), image_size=5)
    found = taken(data).as_dict()
    rows = {column["name"]: column for column in found["all"]["columns"]}
    assert list(rows) == ["channel 0", "channel 1", "channel 2", "height", "width"]
    sizes = np.concatenate(list(data.stored_sizes(0)) + list(data.stored_sizes(1)))
    assert len(sizes) == found["all"]["samples"] == rows["height"]["count"]
    assert rows["channel 0"]["count"] == len(sizes) * 25
    assert (rows["height"]["minimum"], rows["height"]["maximum"]) == (4, 8)
    assert rows["width"]["mean"] == pytest.approx(sizes[:, 1].mean())
    assert found["clients"]["b"]["columns"][3]["variance"] == 0


def test_of_texts_classes_alone_are_counted(tmp_path: Path) -> None:
    for part, count in (("train", 30), ("test", 6)):
        with gzip.open(tmp_path / f"{part}.csv.gz", "wt") as file:
            file.write("label,text\n" + "".join(f"{row % 3},word {row}\n" for row in range(count)))
    data = CSVText(root=str(tmp_path), num_clients=2)
    found = taken(data)
    assert found.as_dict()["all"]["classes"] == [10, 10, 10]
    assert found.as_dict()["all"]["columns"] == []
    assert "30 training samples" in found.text()
