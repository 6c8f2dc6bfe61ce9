"""Tables in CSV and Parquet files."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_fed import Classifier, Regressor
from lit_fed.data import Dirichlet, Table
from lit_fed.errors import ConfigError
from tests.support import fit

PLANTS = """\
site, petal, sepal, kind
north,1.0,10.0,rose
south,2.0,20.0,tulip
north,3.0,30.0,rose
south,4.0,40.0,rose

south,5.0,50.0,tulip
north,6.0,60.0,lily
"""
HOUSES = """\
rooms,area,price,rent
1.0,30.0,100.5,9.5
2.0,60.0,200.0,19
3.0,90.0,300.0,29.5
4.0,120.0,400.0,39
"""


def written(folder: Path, text: str, name: str = "table.csv") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def ready(*args: Any, **kwargs: Any) -> Any:
    data = Table(*args, **kwargs)
    data.setup()
    return data


def test_classes_and_clients_are_what_the_file_calls_them(tmp_path: Path) -> None:
    path = written(tmp_path, PLANTS)
    data = ready(path, "kind", client="site", test_path=path)
    assert (data.num_classes, data.class_names) == (3, ["lily", "rose", "tulip"])
    assert (data.num_clients, data.client_names) == (2, ["north", "south"])
    assert (data.feature_names, data.input_shape) == (["petal", "sepal"], (2,))
    # north: rose, rose, lily; south: tulip, rose, tulip
    assert data.census.class_histogram().tolist() == [[1, 2, 0], [0, 1, 2]]
    x, y = (torch.cat(parts) for parts in zip(*data.test_loader(1), strict=True))
    assert y.tolist() == [2, 1, 2]
    # petals are 1 … 6: mean 3.5, variance 35/12; sepals are ten times as large, so that they look the same.
    expected = (torch.tensor([2.0, 4.0, 5.0]) - 3.5) / (35 / 12) ** 0.5
    torch.testing.assert_close(x, expected[:, None].expand(3, 2))
    assert data.describe(1)["name"] == "south"
    (step,) = data.preprocessing()
    assert (step["step"], step["mean"], step["max_value"]) == ("normalize", [3.5, 35.0], 1.0)


def test_whole_numbers_are_classes_in_their_order_or_numbers_where_that_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, "x,y\n" + "\n".join(f"{i}.0,{[10, 9, -1][i % 3]}" for i in range(12)))
    data = ready(path, "y", num_clients=2)
    assert data.class_names == ["-1", "9", "10"]
    assert data._ready.strata.max() == 2
    data = ready(path, "y", num_clients=2, kind="numbers", standardise=False)
    assert (data.num_classes, data.class_names, data.output_shape) == (None, None, ())
    x, y = (torch.cat(parts) for parts in zip(*data.test_loader(), strict=True))
    assert y.tolist() == [[10, 9, -1][int(i) % 3] for i in x[:, 0]]


IDENTIFIERS = {
    "counted": "\n".join(f"{i},{i % 3}.5,{'xy'[i % 2]}" for i in range(40)),
    "drawn": "\n".join(f"{9973 * i % 9901 + 10**9},{i % 3}.5,{'xy'[i % 2]}" for i in range(40)),  # equal in float32
}


@pytest.mark.parametrize("case", IDENTIFIERS)
def test_a_column_that_identifies_a_row_is_a_feature_only_by_name(case: str, tmp_path: Path) -> None:
    path = written(tmp_path, "id,width,kind\n" + IDENTIFIERS[case])
    with pytest.raises(
        ConfigError, match=r"table\.csv: 'id' is a whole number that differs in every row.*data\.features"
    ):
        ready(path, "kind", num_clients=2)
    assert ready(path, "kind", ["width"], num_clients=2).input_shape == (1,)
    assert ready(path, "kind", ["id", "width"], num_clients=2).feature_names == ["id", "width"]
    # one value twice, or a number with a fraction, and it is a measurement
    for cell in ("2", "3.5"):
        lines = IDENTIFIERS["counted"].splitlines()
        lines[3] = f"{cell},0.5,x"
        assert ready(written(tmp_path, "id,width,kind\n" + "\n".join(lines)), "kind", num_clients=2).input_shape == (2,)


def test_a_column_that_counts_the_rows_of_every_clients_file_identifies_them_too(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 0), ("c", 1)):  # as pandas writes its index, under an empty name
        lines = [f"{first + i},{i % 3}.5,{i % 2}" for i in range(10)]
        written(tmp_path, ",width,kind\n" + "\n".join(lines), f"sites/{name}.csv")
    with pytest.raises(ConfigError, match=r"a\.csv: '' is a whole number that counts the rows of every file"):
        ready(str(tmp_path / "sites"), "kind")
    assert ready(str(tmp_path / "sites"), "kind", ["width"]).num_clients == 3


def test_the_features_that_were_not_named_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ready(written(tmp_path, PLANTS), "kind", client="site", test_fraction=0.5)
    data.setup("test")
    assert capsys.readouterr().out == f"{tmp_path / 'table.csv'}: 2 features, petal, sepal (data.features)\n"
    ready(written(tmp_path, PLANTS), "kind", ["petal"], "site", test_fraction=0.5)
    assert capsys.readouterr().out == ""
    wide, last = ",".join(f"f{i}" for i in range(30)), "f18, f19, … (data.features)\n"
    ready(written(tmp_path, f"{wide},y\n" + f"{'1,' * 30}a\n{'1,' * 30}b\n" * 5), "y", num_clients=2)
    assert capsys.readouterr().out.endswith(last)


def test_real_targets_one_or_several(tmp_path: Path) -> None:
    path = written(tmp_path, HOUSES)
    data = ready(path, "price", features=["area", "rooms"], test_path=path, num_clients=2)
    assert (data.num_classes, data.output_shape, data.feature_names) == (None, (), ["area", "rooms"])
    data = ready(path, ["price", "rent"], test_path=path, num_clients=2)
    assert (data.output_shape, data.feature_names) == ((2,), ["rooms", "area"])
    ((_, y),) = data.test_loader()
    assert y.tolist() == [[100.5, 9.5], [200.0, 19.0], [300.0, 29.5], [400.0, 39.0]]


def test_a_folder_has_a_file_a_client(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("c.d", 10), ("b", 20)):
        lines = "\n".join(f"{first + i}.0,{'xy'[i % 2]}" for i in range(5 + first))
        written(tmp_path, "value,label\n" + lines, f"sites/{name}.csv")
    with gzip.open(tmp_path / "sites" / "e.csv.gz", "wt") as file:
        file.write("value,label\n" + "\n".join(f"{i},x" for i in range(10)))
    written(tmp_path, "no table", "sites/README.txt")
    data = ready(str(tmp_path / "sites"), "label", test_fraction=0.2)
    assert data.client_names == ["a", "b", "c.d", "e"]
    # A fifth of 5, 25, 15 and 10 rows are tested on.
    assert [data.census.num_samples(k) for k in range(4)] == [4, 20, 12, 8]
    assert [data.test_loader(k).num_samples for k in range(4)] == [1, 5, 3, 2]
    assert data.feature_names == ["value"]


def test_a_table_trains_classes_and_numbers_and_names_its_clients(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)) * [1, 100, 0.01]
    y = x @ [1, 0.01, 100]
    lines = [
        f"{a},{b},{c},{t},{'high' if t > 0 else 'low'},{'ABC'[i % 3]}"
        for i, ((a, b, c), t) in enumerate(zip(x, y, strict=True))
    ]
    path = written(tmp_path, "a,b,c,y,level,ward\n" + "\n".join(lines))
    made = fit(
        tmp_path,
        Classifier("logistic", num_classes=2, input_shape=(3,)),
        Table(path, "level", ["a", "b", "c"], "ward"),
        max_rounds=10,
        local_epochs=5,
    )
    assert made.metrics["global/acc"] > 0.9
    assert made.run.federation.data.client_names == ["A", "B", "C"]
    data = Table(path, "y", ["a", "b", "c"], num_clients=4, strata=3, partition=Dirichlet(0.5))
    made = fit(tmp_path, Regressor("logistic", num_outputs=1, input_shape=(3,)), data, max_rounds=20, local_epochs=5)
    assert made.metrics["global/r2"] > 0.9
    assert set(np.unique(data._ready.strata)) == {0, 1, 2}  # type: ignore[arg-type]


KIND = {"target": "kind"}
BY_SITE = {"target": "kind", "client": "site"}
WRONG = {
    "column": (PLANTS, {"target": "kinds"}, "has no column 'kinds', which data.target names; did you mean kind?"),
    "no column": (PLANTS, {"target": "x" * 9}, "names; it has site, petal, sepal, kind"),
    "client": (
        PLANTS, {"target": "kind", "client": "ward"},
        "has no column 'ward', which data.client names; it has site",
    ),
    "feature": (
        PLANTS, {"target": "kind", "features": ["leaf"]},
        "has no column 'leaf', which data.features names; it has",
    ),
    "text": (PLANTS, KIND, "site holds texts, such as 'north', and data.features needs numbers; name other"),
    "line": (PLANTS.replace("50.0", "5o"), BY_SITE, "line 7: sepal is '5o', not a number; correct"),
    "empty cell": (PLANTS.replace("50.0", ""), BY_SITE, "line 7: sepal is empty, not a number"),
    "not finite": (PLANTS.replace("50.0", "inf"), BY_SITE, "line 7: sepal is 'inf', not a finite number"),
    "32 bits": (PLANTS.replace("50.0", "1e39"), BY_SITE, "line 7: sepal is '1e39', not a finite number of 32 bits"),
    "target of 32 bits": (
        HOUSES.replace("300.0", "-1e39"), {"target": "price"},
        "line 4: price is '-1e39', not a finite number of 32",
    ),
    "two notations": (
        "x,y\n1.5,1\n2.5,0\n3.5,1.0\n4.5,0\n", {"target": "y"},
        "y is '1.0' in {path}, line 4, and '1' in {path}, line 2; write all as whole numbers, or set data.kind to",
    ),
    "no target": (PLANTS.replace("lily", " "), BY_SITE, "line 8: kind is empty, not a name or a whole"),
    "no client": (PLANTS.replace("\nnorth,3", "\n,3"), BY_SITE, "line 4: site is empty, not a name"),
    "short": (PLANTS.replace(",lily", ""), BY_SITE, "line 8 has 3 cells and line 1 has 4; correct the row"),
    "nothing": ("", KIND, "has no rows; give one sample per row"),
    "header": ("site,kind\n", KIND, "has no rows below its header; give one sample per row"),
    "twice": (PLANTS.replace("petal", "sepal"), KIND, "has two columns named 'sepal'; rename one"),
    "quote": (PLANTS.replace("rose", '"rose', 1), KIND, "cannot be read (unexpected end of data); it must be a UTF-8"),
    "alone": ("kind\nrose\n", KIND, "has no column beside the target and the client; add a feature to learn from"),
    "number": (
        HOUSES.replace("300.0", "x3"), {"target": "price", "kind": "numbers"},
        "line 4: price is 'x3', not a number",
    ),
    "several": (PLANTS, {"target": ["kind", "site"], "features": ["petal"]}, "kind holds texts, such as 'rose'"),
    "kinds": (
        PLANTS, {"target": ["kind", "site"], "kind": "classes"},
        "data.target names 2 columns, as for a regression",
    ),
    "overlap": (
        PLANTS, {"target": "kind", "features": ["kind"]},
        "data.features names 'kind', which is the target or the",
    ),
    "no features": (PLANTS, {"target": "kind", "features": []}, "data.features is empty; name one column or more"),
    "no targets": (PLANTS, {"target": []}, "data.target is empty; name one column or more"),
    "fraction": (
        PLANTS, {"target": "kind", "test_fraction": 1.0},
        "data.test_fraction is 1.0; it must be above 0 and below 1",
    ),
    "few": (PLANTS, BY_SITE, "too few rows to hold out 0.2 of every client's; raise data.test_fraction"),
    "strata": (
        PLANTS, {"target": "kind", "client": "site", "strata": 2, "test_fraction": 0.5},
        "data.strata needs numerical targets",
    ),
    "unlikely": (
        "x,y\n" + "\n".join(f"{i}.5,{i}" for i in range(200)),
        {"target": "y"},
        "y has 200 different values in 200 rows, too many for classes; set data.kind to numbers for a regression",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_file_is_said_in_a_line(case: str, tmp_path: Path) -> None:
    text, settings, message = WRONG[case]

    def use() -> None:
        ready(written(tmp_path, text), **settings)

    with pytest.raises(ConfigError) as error:
        use()
    assert message.replace("{path}", str(tmp_path / "table.csv")) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_class_and_a_client_are_the_same_however_their_number_is_written(tmp_path: Path) -> None:
    lines = [f"{i}.5,{['7', '7.0', '08', '8e0'][i % 4]},{['1', '01.0', '2.'][i % 3]}" for i in range(60)]
    path = written(tmp_path, "x,ward,y\n" + "\n".join(lines))
    data = ready(path, "y", client="ward", kind="classes")
    assert (data.class_names, data.client_names) == (["1", "2"], ["7", "08", "8"])  # "08" may be a name
    assert ready(path, "y", features=["x"], kind="numbers", num_clients=2).num_classes is None


@pytest.mark.parametrize("cell", ["1_0", "１２", "1_0.5", "0x10"])
def test_a_cell_that_only_python_takes_for_a_number_is_none(cell: str, tmp_path: Path) -> None:
    text = "a,y\n" + "\n".join(f"{row / 4},{row / 8}" for row in range(20))
    with pytest.raises(ConfigError, match=f"line 22: a is '{cell}', not a number; correct or remove the row"):
        ready(written(tmp_path, f"{text}\n{cell},0.5"), "y", ["a"])
    with pytest.raises(ConfigError, match=f"line 22: y is '{cell}', not a number; correct or remove the row"):
        ready(written(tmp_path, f"{text}\n0.5,{cell}"), "y", ["a"], kind="numbers")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_of_another_encoding_ends_in_a_line(encoding: str, tmp_path: Path) -> None:
    lines = ["site,petal,kind", *(f"Köln,{row % 7},{'rose' if row % 2 else 'lily'}" for row in range(20))]
    (tmp_path / "t.csv").write_bytes("\n".join(lines).encode(encoding))
    with pytest.raises(ConfigError, match=r"t\.csv cannot be read \(.*\); it must be a UTF-8 CSV file"):
        ready(str(tmp_path / "t.csv"), "kind", client="site")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such a name themselves")
def test_a_clients_file_with_a_name_in_latin_1_ends_in_a_line(tmp_path: Path) -> None:
    for name in (b"K\xf6ln", b"Bonn"):
        rows = "\n".join(f"{row % 7}.5,{'rose' if row % 2 else 'lily'}" for row in range(20))
        with open(bytes(tmp_path) + b"/" + name + b".csv", "w") as file:
            file.write(f"petal,kind\n{rows}")
    with pytest.raises(ConfigError, match=r"the name 'K\\udcf6ln' is not UTF-8; rename its file or folder"):
        ready(str(tmp_path), "kind", ["petal"])


def test_files_that_write_a_class_in_two_ways_are_asked_which(tmp_path: Path) -> None:
    for name, y in (("a", "1"), ("b", "1.0")):
        written(tmp_path, "x,y\n" + "\n".join(f"{i}.5,{y if i % 2 else 0}" for i in range(10)), f"sites/{name}.csv")
    with pytest.raises(ConfigError, match=r"y is '1\.0' in .*b\.csv, line 3, and '0' in .*a\.csv, line 2; write all"):
        ready(str(tmp_path / "sites"), "y")
    assert ready(str(tmp_path / "sites"), "y", kind="classes").class_names == ["0", "1"]


def test_a_classifier_on_real_targets_is_told_what_to_use(tmp_path: Path) -> None:
    path = written(tmp_path, "x,y\n" + "\n".join(f"{i % 9},{i / 2 + 0.25}" for i in range(20)))
    with pytest.raises(
        ConfigError, match=r"targets are floating-point numbers; use Regressor, or .* set data\.kind to classes"
    ):
        fit(tmp_path, Classifier("logistic", num_classes=2, input_shape=(1,)), Table(path, "y", num_clients=2))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.csv").write_bytes("a,b\nü,1\n".encode("latin-1"))
    plants = written(tmp_path, PLANTS)
    strange = written(tmp_path, PLANTS.replace("lily", "iris"), "strange.csv")
    for path, test_path, message in (
        (tmp_path / "gone.csv", None, "gone.csv does not exist; name a file that ends in .csv, .csv.gz, .parquet"),
        (tmp_path / "empty", None, "holds no .csv, .csv.gz, .parquet file; set data.path to a folder of them, one per"),
        (written(tmp_path, "", "table.xlsx"), None, "table.xlsx is not a table; name a file that ends in .csv"),
        (tmp_path / "latin.csv", None, "latin.csv cannot be read ('utf-8' codec"),
        (plants, tmp_path / "gone.csv", "gone.csv does not exist"),
        (plants, strange, "strange.csv: target 'iris' is not a class of the training rows, which have lily"),
    ):
        with pytest.raises(ConfigError) as error:
            ready(str(path), "kind", client="site", test_path=None if test_path is None else str(test_path))
        assert message in str(error.value)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow; install it with pip install 'lit-fed\[parquet\]'"):
        ready(written(tmp_path, "", "t.parquet"), "kind")


def test_parquet_is_read_as_csv_is(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "site": pyarrow.array(["north", "south"] * 10).dictionary_encode(),
        "petal": pyarrow.array([i // 2 for i in range(20)], pyarrow.int16()),
        "kind": [["rose", "lily"][i % 2] for i in range(20)],
        "price": pyarrow.array([i / 4 for i in range(20)], pyarrow.float32()),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    lines = [
        ",".join(map(str, row))
        for row in zip(
            *(pyarrow.array(c).to_pylist() if not hasattr(c, "to_pylist") else c.to_pylist() for c in columns.values()),
            strict=True,
        )
    ]
    text = written(tmp_path, ",".join(columns) + "\n" + "\n".join(lines))
    for settings in (
        BY_SITE,
        {"target": "price", "client": "site", "features": ["petal"]},
    ):
        first, second = (ready(str(path), **settings) for path in (text, tmp_path / "t.parquet"))
        assert first.class_names == second.class_names
        assert first.client_names == second.client_names
        for one, other in zip(first.test_loader(), second.test_loader(), strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
    for broken, message in (
        ({"petal": [1, None, 3]}, "row 1: petal is empty, not a finite number"),
        ({"kind": ["a", None, "b"]}, "row 1: kind is empty, not a name or a whole number"),
        ({"petal": pyarrow.array([1, 2, 3], pyarrow.timestamp("s"))}, "petal holds dates, such as"),
        ({"petal": [[1.0], [2.0, 3.0], None]}, "petal holds lists, and data.features needs a number or a text in each"),
        ({"petal": [None, {"a": 1}, None]}, "petal holds lists, and data.features needs a number or a text in each"),
        ({"kind": [["a"], ["b"], ["a"]]}, "kind holds lists, and data.target needs a number or a text in each row"),
    ):
        table = {"petal": [1, 2, 2], "kind": ["a", "b", "a"]} | broken
        parquet.write_table(pyarrow.table(table), tmp_path / "broken.parquet")
        with pytest.raises(ConfigError) as error:
            ready(str(tmp_path / "broken.parquet"), "kind")
        assert message in str(error.value)
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"torn\.parquet cannot be read \(.*\); write it anew"):
        ready(str(tmp_path / "torn.parquet"), "kind")
