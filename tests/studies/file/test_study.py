"""The study file: what it may hold, how profiles change it, and how mistakes in it are told."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import pytest
import yaml

from lit_fed.engine.lightning.metric_names import MetricNames
from lit_fed.errors import ConfigError
from lit_fed.studies.file.study import Place, read_study

SMALL = {
    "metric": "global/acc",
    "configs": ["base.yaml"],
    "set": {"trainer.max_rounds": 9, "trainer.num_threads": 1},
    "seeds": [0, 1],
    "rows": {"a": {"label": "Method A", "set": {"model.mu": 1}}, "b": {}},
    "columns": {"x": {}, "y": {"metric": "train/loss"}},
    "published": {"a": {"x": 0.5, "y": [0.25, 0.1]}},
    "claims": ["a > b at x"],
    "profiles": {
        "paper": {},
        "pocket": {"set": {"trainer.max_rounds": 2}, "seeds": [7], "rows": {"b": None}, "claims": []},
    },
}


def study(tmp_path: Path, profile: str = "paper", **changes):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return read_study(path, profile)


def error(tmp_path: Path, profile: str = "paper", **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        study(tmp_path, profile, **changes)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "small.yaml"))
    return message.removeprefix(str(tmp_path / "small.yaml")).removeprefix(": ")


def test_a_file_becomes_a_study(tmp_path):
    read = study(tmp_path)
    assert (read.name, read.profile, read.seeds, read.configs) == ("small", "paper", (0, 1), ("base.yaml",))
    assert (read.rows["a"].label, read.rows["b"].label, read.rows["a"].set) == ("Method A", "b", {"model.mu": 1})
    assert list(map(str, read.places)) == ["a/x", "a/y", "b/x", "b/y"]
    assert read.published == {Place("a", "x"): (0.5, None), Place("a", "y"): (0.25, 0.1)}
    assert read.claims[0].text == "a > b at x"


def test_a_column_may_be_another_metric(tmp_path):
    read = study(tmp_path, scale=100, columns={"x": {}, "y": {"metric": "train/loss", "scale": 1, "report": "best"}})
    names = MetricNames(monitor="global/mse")
    x, y = read.measure_of(Place("a", "x"), names), read.measure_of(Place("a", "y"), names)
    assert (x.metric, x.report, x.lower, x.scale, x.decimals) == ("global/acc", "last", False, 100, 2)
    assert (y.metric, y.report, y.lower, y.scale, y.decimals) == ("train/loss", "best", True, 1, 4)
    other = read.measure_of(Place("a", "x"), names, "drift/cosine_mean")
    assert (other.metric, other.scale) == ("drift/cosine_mean", 1)


def test_values_that_span_decades_count_by_their_logarithm(tmp_path):
    read = study(tmp_path, scale="log10", columns={"x": {}, "y": {"scale": 100}})
    names = MetricNames(monitor="global/mse")
    x, y = read.measure_of(Place("a", "x"), names), read.measure_of(Place("a", "y"), names)
    assert [x.shown(value) for value in (1000.0, 1.0, 0.01)] == [3.0, 0.0, -2.0]
    assert isnan(x.shown(0.0))
    assert isnan(x.shown(-1.0))
    assert (x.words, x.decimals) == ("log10 of global/acc", 4)
    assert (y.words, y.shown(0.25)) == ("global/acc × 100", 25.0)
    with pytest.raises(ConfigError, match="scale is 'log2'; it must be a positive number or log10"):
        study(tmp_path, scale="log2")


def test_a_profile_is_laid_over_the_file(tmp_path):
    read = study(tmp_path, "pocket")
    assert read.set == {"trainer.max_rounds": 2, "trainer.num_threads": 1}
    assert (read.seeds, list(read.rows), read.claims) == ((7,), ["a"], ())
    assert study(tmp_path).set["trainer.max_rounds"] == 9


AGAIN = {"again": "pocket", "seeds": [8, 9], "columns": {"y": None}, "claims": ["a > 0.5 at x"]}


def test_a_profile_that_asks_again_has_the_runs_of_the_one_it_names(tmp_path):
    profiles = {"paper": {}, "pocket": SMALL["profiles"]["pocket"], "more": AGAIN}
    first, again = (study(tmp_path, profile, profiles=profiles, published=None) for profile in ("pocket", "more"))
    assert (first.set, first.rows, first.configs) == (again.set, again.rows, again.configs)
    assert (again.again, again.seeds, list(again.columns)) == ("pocket", (8, 9), ["x"])
    assert [claim.text for claim in again.claims] == ["a > 0.5 at x"]
    assert first.again == ""


def test_what_was_asked_again_can_be_asked_once_more(tmp_path):
    profiles = {"pocket": SMALL["profiles"]["pocket"], "more": AGAIN, "most": AGAIN | {"again": "more", "seeds": [5]}}
    most = study(tmp_path, "most", profiles=profiles, published=None)
    assert (most.again, most.seeds, list(most.columns)) == ("more", (5,), ["x"])
    assert most.set == study(tmp_path, "pocket", profiles=profiles, published=None).set
    for seed, whose in ((7, "pocket"), (9, "more")):
        taken = profiles | {"most": AGAIN | {"again": "more", "seeds": [seed]}}
        said = error(tmp_path, "most", profiles=taken, published=None)
        assert said.startswith(f"profiles.most.seeds: {whose!r} has seed {seed}, too")
    circle = {"pocket": AGAIN | {"again": "more", "seeds": [3]}, "more": AGAIN}
    assert "does not exist or asks this one again" in error(tmp_path, "more", profiles=circle, published=None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"again": "small"}, ".again: the profile 'small' does not exist or asks this one again"),
        ({"again": "more"}, ".again: the profile 'more' does not exist or asks this one again"),
        ({"seeds": [6, 7]}, ".seeds: 'pocket' has seed 7, too; choose other seeds"),
        ({"set": {"trainer.max_rounds": 3}}, ": unknown key 'set'"),
        ({"rows": {"a": {"set": {"model.mu": 2}}}}, ".rows: 'a' must be the same as in 'pocket'; remove it"),
    ],
    ids=str,
)
def test_other_runs_are_not_the_same_asked_again(tmp_path, changes, expected):
    profiles = {"pocket": SMALL["profiles"]["pocket"], "more": AGAIN | changes}
    assert error(tmp_path, "more", profiles=profiles, published=None).startswith(f"profiles.more{expected}")


@pytest.mark.parametrize("name", ["more", "most"])
def test_seeds_that_are_not_given_are_not_other_ones(tmp_path, name):
    profiles = {"pocket": SMALL["profiles"]["pocket"], "more": dict(AGAIN), "most": AGAIN | {"again": "more"}}
    del profiles[name]["seeds"]
    assert f"profiles.{name}.seeds: " in error(tmp_path, name, profiles=profiles, published=None)


def test_to_ask_again_takes_seeds(tmp_path):
    profiles = {"pocket": {}, "more": {"again": "pocket"}}
    assert "has seed 0, too" in error(tmp_path, "more", profiles=profiles)


def test_a_study_of_rows_alone_has_one_column(tmp_path):
    read = study(tmp_path, columns=None, published=None, claims=["a > b"])
    assert list(map(str, read.places)) == ["a/all", "b/all"]


def test_skipped_places_stay_empty(tmp_path):
    assert list(map(str, study(tmp_path, skip=["b/y"]).places)) == ["a/x", "a/y", "b/x"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"colums": {}}, "unknown key 'colums'; did you mean columns?"),
        ({"rows": {"a": {"config": []}}}, "rows.a: unknown key 'config'; did you mean configs?"),
        ({"rows": {"a": {"x": "far"}}}, "rows.a.x is 'far'; it must be a number"),
        ({"rows": {"a": {"x": True}}}, "rows.a.x is True; it must be a number"),
        ({"pictures": "poses"}, "pictures is 'poses'; it must be a list of texts"),
        ({"rows": {"a": ["x.yaml"]}}, "rows.a is ['x.yaml']; it must be a mapping"),
        ({"rows": None, "claims": [], "published": None}, "rows is missing; name at least one row"),
        ({"rows": {"a b": {}}}, "rows: 'a b' is not a valid name"),
        ({"rows": {"10": {}}}, "rows: '10' is not a valid name; it must be one word that is not a number"),
        ({"rows": {"at": {}}}, "rows: 'at' is not a valid name"),
        ({"rows": {"../a": {}}}, "rows: '../a' is not a valid name"),
        ({"rows": {"x": {}}, "published": None}, "'x' is a row and a column"),
        ({"metric": None}, "metric is None; it must be a text"),
        ({"metric": ""}, "metric is ''; it must be the name of a metric, such as global/acc, or left out"),
        (
            {"report": "first"},
            "report is 'first'; it must be last, best, mean, 'best of' and a metric, or 'first', a metric, 'at' and a "
            "number",
        ),
        ({"scale": -1}, "scale is -1; it must be a positive number or log10"),
        ({"scale": 1e300}, "scale is 1e+300; it must be a number from 1e-12 to 1e+12"),
        ({"scale": 1e-300}, "scale is 1e-300; it must be a number from 1e-12 to 1e+12"),
        (
            {"columns": {"x": {"scale": 10**13}}},
            "columns.x.scale is 10000000000000; it must be a number from 1e-12 to 1e+12",
        ),
        ({"decimals": 1.5}, "decimals is 1.5; it must be a whole number from 0 to 12"),
        ({"seeds": 3}, "seeds is 3; it must be a list of distinct whole numbers"),
        ({"seeds": [1, 1]}, "seeds is [1, 1]; it must be a list of distinct whole numbers"),
        (
            {"seeds": [1, 2**32]},
            "seeds is [1, 4294967296]; it must be a list of distinct whole numbers from 0 to 2³² − 1",
        ),
        ({"configs": "base.yaml"}, "configs is 'base.yaml'; it must be a list of texts"),
        ({"skip": ["a/z"]}, "skip: a/z: the column 'z' does not exist; choose one of x, y"),
        ({"published": {"c": {"x": 1}}}, "published: c/x: the row 'c' does not exist; choose one of a, b"),
        ({"published": {"a": {"x": "much"}}}, "published.a/x is 'much'; it must be a number"),
        ({"claims": ["a > c at x"]}, "claim 1, 'a > c at x': the row 'c' does not exist"),
        ({"profiles": {"paper": {"sets": {}}}}, "profiles.paper: unknown key 'sets'; did you mean set?"),
        ({"profiles": {"paper": []}}, "profiles.paper is []; it must be a mapping"),
        ({"configs": {}}, "configs is {}; it must be a list of texts"),
        ({"claims": {}}, "claims is {}; it must be a list"),
        ({"skip": ""}, "skip is ''; it must be a list of texts"),
        ({"published": {"a": []}}, "published.a is []; it must be a mapping"),
        ({"profiles": {"full": {}}}, "the profile 'paper' does not exist; choose one of full"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_mistake_is_named_with_its_place(changes, expected, tmp_path):
    assert error(tmp_path, **changes).startswith(expected)


def test_the_name_for_print_is_of_the_metric_beside_it(tmp_path):
    columns = {"x": {}, "y": {"metric": "train/loss"}, "z": {"y_label": "share\n correct"}}
    read = study(tmp_path, scale=100, y_label="accuracy in %", columns=columns)
    x, y, z = (read.measure_of(Place("a", name), MetricNames()) for name in "xyz")
    assert [one.printed for one in (x, y, z)] == ["accuracy in %", "train/loss × 100", "share correct"]
    assert x.words == "global/acc × 100", "tables of numbers keep the column's name"
    assert read.measure_of(Place("a", "x"), MetricNames(), "drift/cosine_mean").printed == "drift/cosine_mean"
    assert error(tmp_path, y_label=["accuracy"]).startswith("y_label")
    labels = {"global/acc": "accuracy", "train/loss": " loss\n in training"}
    read = study(tmp_path, scale=100, y_label="accuracy in %", columns=columns, metric_labels=labels)
    told = [read.measure_of(Place("a", name), MetricNames()).printed for name in "xyz"]
    assert told == ["accuracy in %", "loss in training", "share correct"], "a label beside the metric goes first"
    assert error(tmp_path, columns=columns, metric_labels={"train/loss": 3}).startswith("metric_labels.train/loss")
    unknown = "metric_labels: no metric, report or claim names 'train/los'; did you mean train/loss?"
    assert error(tmp_path, columns=columns, metric_labels={"train/los": "loss"}) == unknown
    elsewhere = {"pocket": {"metric": "train/loss"}, "paper": {}}
    assert study(tmp_path, metric_labels={"train/loss": "loss"}, profiles=elsewhere), "another profile shows it"


@pytest.mark.parametrize(
    ("measure", "head"),
    [
        ("", "result"),
        ("metric: global/acc\n", "global/acc"),
        ("y_label: accuracy in %\n", "accuracy in %"),
        ("metric: global/acc\nmetric_labels: {global/acc: accuracy}\n", "accuracy"),
    ],
)
def test_the_only_column_of_a_study_without_columns_is_called_by_what_is_measured(measure, head, tmp_path):
    path = tmp_path / "bare.yaml"
    path.write_text(f"rows: {{a: {{}}}}\n{measure}")
    assert {name: column.label for name, column in read_study(path).columns.items()} == {"all": head}


def test_without_a_metric_it_is_what_the_run_monitors_with_its_direction(tmp_path):
    path = tmp_path / "bare.yaml"
    path.write_text("rows: {a: {}}\nprofiles: {paper: {}}\n")
    bare = read_study(path, "paper")
    names = MetricNames(directions={"score": "min"}, monitor="global/score")
    measure = bare.measure_of(Place("a", "all"), names)
    assert (measure.metric, measure.lower) == ("global/score", True)
    assert bare.measure_of(Place("a", "all"), MetricNames()).metric == "", "not known before a run has ended"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rows: {a: {}\n", "line 2: "),
        ("- a\n", "holds no study; write keys such as rows:, columns: and metric:"),
        ("\0", "is not YAML"),
        (
            "title: a\nrows:\n  a: {}\n  b: {}\n  a: {}\n",
            r"bad\.yaml, line 5: rows\.a is given twice, also in line 3; rem",
        ),
        (
            "set: {trainer.seed: 1, trainer.seed: 2}\n",
            "line 1: set.trainer.seed is given twice, in this line too; remove",
        ),
    ],
)
def test_a_broken_file_is_named(text, expected, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        read_study(path, "paper")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"study file .*none\.yaml does not exist"):
        read_study(tmp_path / "none.yaml", "paper")
    with pytest.raises(ConfigError, match="is a folder"):
        read_study(tmp_path, "paper")
