"""A study: rows, columns, seeds, a measure, published values and claims, read from a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import log10, nan
from pathlib import Path
from typing import Any, NamedTuple

from lit_fed.command.reading.config_files import read_settings
from lit_fed.command.reading.shipped import located
from lit_fed.command.reading.words import check_values
from lit_fed.engine.lightning.metric_names import MetricNames
from lit_fed.file_names import is_file_name
from lit_fed.studies.file.claims import Claim, meant, parse_claim
from lit_fed.studies.file.rounds import WANTED_REPORT, guide_of, is_report
from lit_fed.studies.file.sweep import unrolled
from lit_fed.studies.file.where import Where

_MOST_SCALE = 1e12  # bytes to terabytes; larger factors show zeros or noise
_MEASURE = ("metric", "y_label", "report", "better", "scale", "decimals")
_LOG = "log10"
VARIANT_KEYS = ("label", "x", "configs", "set", "grid", *_MEASURE)
STUDY_KEYS = (
    *("title", "source", "about", "configs", "set", "grid", *_MEASURE, "seeds", "partition_seed", "rows", "columns"),
    *("skip", "published", "claims", "metric_labels", "x_label", "along", "band", "pictures", "profiles"),
)
PROFILE_KEYS = (*(key for key in STUDY_KEYS if key != "profiles"), "again")
ALONG = {"rounds": "", "bytes": "comm/total_bytes", "seconds": "time/round_s"}
"""Axes of the curves, with the metric that adds up along each."""
BANDS = ("standard error", "interval")
_AGAIN = ("again", "about", "seeds", "rows", "columns", "skip", "claims")
PLAIN = "default"
"""The profile of a study without profiles."""


class Place(NamedTuple):
    """A place in the table.

    Args:
        row: Name of the row.
        column: Name of the column.
    """

    row: str
    column: str

    def __str__(self) -> str:
        return f"{self.row}/{self.column}"


@dataclass(frozen=True)
class Measure:
    """The number that a study reads from a run.

    Args:
        metric: A column of ``metrics.csv``, such as ``global/acc``; empty if the study names none and the monitored
            metric is unknown before a run has finished.
        report: The ``last`` evaluated round, the ``best`` one, the ``mean`` over all of them, the ``best of`` another
            metric, or the ``first`` with another metric ``at`` a number, see `lit_fed.studies.file.rounds.reported`.
        lower: Whether smaller values are better.
        scale: Factor of the values in tables, pictures and claims.
        decimals: Digits after the point in tables.
        log: Take the decimal logarithm instead of scaling, for values that span decades.
        y_label: The metric's name for print, with its unit, such as ``accuracy in %``; empty for none.
    """

    metric: str
    report: str = "last"
    lower: bool = False
    scale: float = 1.0
    decimals: int = 4
    log: bool = False
    y_label: str = ""

    @property
    def printed(self) -> str:
        """The name on axes."""
        return self.y_label or self.words

    @property
    def words(self) -> str:
        """The metric and its transformation."""
        if self.log:
            return f"log10 of {self.metric}"
        return self.metric + ("" if self.scale == 1 else f" × {self.scale:g}")

    def shown(self, value: float) -> float:
        """Scale a value for tables, pictures and claims; the logarithm of a value that is not above 0 is NaN."""
        if self.log:
            return log10(value) if value > 0 else nan
        return self.scale * value


@dataclass(frozen=True)
class Variant:
    """A row or a column, with its settings on top of the study's.

    Args:
        name: Its name in folders and claims.
        label: Its name in tables and pictures.
        configs: Configuration files, merged after the study's.
        set: Single settings by dotted key.
        measure: Overrides of the study's measure.
        x: Its position on the axis of a line plot; None without one.
    """

    name: str
    label: str
    configs: tuple[str, ...] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    measure: Mapping[str, Any] = field(default_factory=dict)
    x: float | None = None


@dataclass(frozen=True)
class Study:
    """A study with one of its profiles applied.

    Args:
        name: Name of the file without its suffix.
        path: The file.
        profile: Name of the profile.
        title: The comparison in one line.
        source: The paper, and the table or figure.
        about: Notes for readers.
        configs: Configuration files of every cell.
        set: Single settings of every cell.
        seeds: Seeds; each is a separate run.
        partition_seed: ``each`` to seed the partition with every seed too, unless a setting gives ``data.seed``;
            ``fixed`` to leave the data's own seed.
        rows: Rows of the table by name, usually methods.
        columns: Columns of the table by name, usually settings or metrics.
        skip: Places without runs.
        published: The paper's value by place, and its standard deviation or None.
        claims: The paper's claims.
        measure: The measure, unless a row or column overrides it.
        again: The profile whose undecided claims this one asks again, over other seeds; empty for none.
        metric_labels: Names for print of metrics, with their units; `Measure.y_label` goes before them.
        x_label: The label of the axis of `Variant.x`.
        along: The axis of the curves, of `ALONG`.
        band: The bands of the curves, of `BANDS`.
        pictures: Pictures of the runs in the report, by their names in TensorBoard.
    """

    name: str
    path: Path
    profile: str
    title: str
    source: str
    about: str
    configs: tuple[str, ...]
    set: Mapping[str, Any]
    seeds: tuple[int, ...]
    rows: Mapping[str, Variant]
    columns: Mapping[str, Variant]
    skip: frozenset[Place]
    published: Mapping[Place, tuple[float, float | None]]
    claims: tuple[Claim, ...]
    measure: Mapping[str, Any]
    again: str = ""
    partition_seed: str = "each"
    metric_labels: Mapping[str, str] = field(default_factory=dict)
    x_label: str = ""
    along: str = "rounds"
    band: str = "standard error"
    pictures: tuple[str, ...] = ()

    @property
    def called(self) -> str:
        """The name, with the profile if there are profiles."""
        return self.name if self.profile == PLAIN else f"{self.name}, profile {self.profile}"

    @property
    def places(self) -> list[Place]:
        """The places with runs, row by row."""
        every = (Place(row, column) for row in self.rows for column in self.columns)
        return [place for place in every if place not in self.skip]

    def names_metric(self, place: Place) -> bool:
        """Whether the study names the metric of a place."""
        row, column = self.rows[place.row], self.columns[place.column]
        return "metric" in {**self.measure, **row.measure, **column.measure}

    def printed(self, metric: str) -> str:
        """Return a metric's name for print, or its own."""
        return self.metric_labels.get(metric, metric)

    def measure_of(
        self, place: Place, names: MetricNames, metric: str | None = None, report: str | None = None
    ) -> Measure:
        """Return the measure of a place.

        Args:
            place: The place.
            names: The known metrics of its runs; the monitor is the default metric.
            metric: A claim's metric, if any.
            report: A claim's round, if any.
        """
        row, column = self.rows[place.row], self.columns[place.column]
        keys = {"metric": names.monitor or ""} | dict(self.measure) | dict(row.measure) | dict(column.measure)
        for settings in (self.measure, row.measure, column.measure):  # a name is that of the metric beside it
            keys["y_label"] = settings.get("y_label", "" if "metric" in settings else keys.get("y_label", ""))
        if metric is not None and metric != keys["metric"]:
            keys = {"metric": metric, "report": keys.get("report", "last")}
        better, log = keys.get("better", "auto"), keys.get("scale") == _LOG
        scale = 1.0 if log else float(keys.get("scale", 1.0))
        return Measure(
            metric=keys["metric"],
            report=report or keys.get("report", "last"),
            lower=names.direction(keys["metric"]) == "min" if better == "auto" else better == "lower",
            scale=scale,
            decimals=keys.get("decimals", min(12, max(0, 4 - round(log10(scale))))),
            log=log,
            y_label=keys.get("y_label", "") or self.metric_labels.get(keys["metric"], ""),
        )


def profiles_of(path: str | Path) -> list[str]:
    """Return the names of a study file's profiles; empty without profiles."""
    return [str(name) for name in read_settings(located(path), "study file").get("profiles") or ()]


def read_study(path: str | Path, profile: str | None = None) -> Study:
    """Read a study file and apply a profile.

    A profile overrides the rest of the file: rows, columns, published values and mappings of settings key by key,
    anything else as a whole. A null drops a row, a column or a published value. A profile with ``again`` overrides the
    profile that it names; it may drop rows and columns, and brings new seeds and claims.

    Args:
        path: The file.
        profile: A profile of the file, such as ``paper`` or ``pocket``. The default is ``pocket`` or the only profile;
            without profiles, the file itself.
    """
    path = Path(located(path))
    content = read_settings(path, "study file", "holds no study; write keys such as rows:, columns: and metric:")
    check_values({f"{path}: {key}": value for key, value in content.items()})
    where = Where(str(path))
    where.check_keys(content, STUDY_KEYS)
    profiles = where.mapping(content, "profiles")
    name = _chosen(where, profiles, profile)
    over = where.at(f"profiles.{name}").checked(_or_none(profiles.get(name)), PROFILE_KEYS)
    below = {key: value for key, value in content.items() if key != "profiles"}
    named = sorted({*_metrics_in(content)} - {""})
    for metric in map(str, where.mapping(_merge(below, over), "metric_labels")):
        if metric not in named:
            there = meant(metric, named) if named else "write metric: beside it"
            raise where.at("metric_labels").error(f"no metric, report or claim names {metric!r}; {there}")
    if "again" in over:
        below = _first_asked(where, below, profiles, name, over)
    return _build(path, name, unrolled(_merge(below, over), where), where)


def _first_asked(
    where: Where,
    file: Mapping[str, Any],
    profiles: Mapping[Any, Any],
    name: str,
    over: Mapping[str, Any],
    later: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the file with the profile whose claims another profile asks again: the same runs over other seeds.

    Args:
        where: The file, for errors.
        file: The content outside profiles.
        profiles: All profiles.
        name: The asking profile.
        over: Its content.
        later: The seeds of profiles that ask this one again in turn, by name.
    """
    here, first = where.at(f"profiles.{name}"), where.text(over, "again")
    below = where.at(f"profiles.{first}").checked(_or_none(profiles.get(first)), PROFILE_KEYS)
    asked = below.get("seeds", file.get("seeds", [0]))
    asking = {**(later or {}), name: over.get("seeds", asked)}
    if first not in profiles or first in asking:
        raise here.at("again").error(f"the profile {first!r} does not exist or asks this one again; name another")
    here.check_keys(over, _AGAIN)
    for key in ("rows", "columns"):
        if kept := [one for one, value in where.mapping(over, key).items() if value is not None]:
            raise here.at(key).error(f"{kept[0]!r} must be the same as in {first!r}; remove it, or drop it with null")
    for one, seeds in asking.items():
        lists = isinstance(seeds, list) and isinstance(asked, list)
        if lists and (common := [seed for seed in seeds if seed in asked]):
            at = where.at(f"profiles.{one}.seeds")
            raise at.error(f"{first!r} has seed {common[0]}, too; choose other seeds")
    before = _first_asked(where, file, profiles, first, below, asking) if "again" in below else dict(file)
    found: dict[str, Any] = _merge(before, below)
    return found


def _metrics_in(content: Any) -> Iterator[str]:
    """Yield the metrics that a file, or a part of it, names by ``metric`` and ``report``."""
    parts = content if isinstance(content, list) else []
    if isinstance(content, dict):
        yield from (str(content.get("metric", "")), guide_of(str(content.get("report", ""))))
        parts = [*content.values()]
    for part in parts:
        yield from _metrics_in(part)


def _chosen(where: Where, profiles: Mapping[Any, Any], wanted: str | None) -> str:
    """Return the profile to apply."""
    if wanted is None:
        known = list(map(str, profiles)) or [PLAIN]
        if "pocket" not in known and len(known) > 1:
            raise where.error(f"the file has several profiles; choose one of {', '.join(known)} with --profile")
        wanted = "pocket" if "pocket" in known else known[0]
    if not is_file_name(wanted):
        raise where.error(f"the profile's name {wanted!r} cannot name a folder; rename it")
    if wanted not in profiles and (profiles or wanted != PLAIN):
        advice = f"choose one of {', '.join(map(str, profiles))}" if profiles else "omit --profile"
        raise where.error(f"the profile {wanted!r} does not exist; {advice}")
    return wanted


def _or_none(value: Any) -> Any:
    """Return a mapping; an empty value in YAML is an empty mapping."""
    return {} if value is None else value


def _merge(below: Any, over: Any) -> Any:
    """Merge mappings key by key; replace anything else."""
    if not (isinstance(below, dict) and isinstance(over, dict)):
        return over
    return below | {key: _merge(below[key], value) if key in below else value for key, value in over.items()}


def _build(path: Path, profile: str, content: dict[str, Any], where: Where) -> Study:
    rows = _variants(where.at("rows"), where.mapping(content, "rows"))
    columns = _variants(where.at("columns"), where.mapping(content, "columns"))
    if not rows:
        raise where.error("rows is missing; name at least one row, or sweep a setting with grid")
    measure = _measure(where, content)
    metric, labels = measure.get("metric", "result"), where.mapping(content, "metric_labels")
    labels = {str(name): where.at("metric_labels").text(labels, name) for name in labels if labels[name] is not None}
    columns = columns or {"all": Variant("all", measure.get("y_label") or labels.get(metric, metric))}
    if both := [name for name in rows if name in columns]:
        raise where.error(f"{both[0]!r} is a row and a column, which claims cannot distinguish; rename one")
    skip = frozenset(_place(where.at("skip"), word, rows, columns) for word in where.texts(content, "skip"))
    claims = [] if content.get("claims") is None else content["claims"]
    if not isinstance(claims, list):
        raise where.at("claims").refusal(claims, "a list")
    study = Study(
        name=where.at("file name").name(path.stem),
        path=path,
        profile=profile,
        title=where.text(content, "title", path.stem),
        source=where.text(content, "source"),
        about=where.text(content, "about"),
        configs=where.texts(content, "configs"),
        set=where.mapping(content, "set"),
        seeds=_seeds(where.at("seeds"), content.get("seeds", [0])),
        rows=rows,
        columns=columns,
        skip=skip,
        published=_published(where.at("published"), where.mapping(content, "published"), rows, columns),
        claims=tuple(
            parse_claim(claim, f"{path}: claim {number}", list(rows), list(columns), skip)
            for number, claim in enumerate(claims, 1)
        ),
        measure=measure,
        again=where.text(content, "again"),
        partition_seed=where.choice(content, "partition_seed", ("each", "fixed")),
        metric_labels=labels,
        x_label=where.text(content, "x_label"),
        along=where.choice(content, "along", tuple(ALONG)),
        band=where.choice(content, "band", BANDS),
        pictures=where.texts(content, "pictures"),
    )
    if not study.places:
        raise where.error("skip leaves no place of the table; remove an entry")
    return study


def _variants(where: Where, content: Mapping[Any, Any]) -> dict[str, Variant]:
    variants = {}
    for key, value in content.items():
        if value is None:
            continue
        name, here = where.name(key), where.at(str(key))
        settings = here.checked(value, VARIANT_KEYS)
        variants[name] = Variant(
            name=name,
            label=here.text(settings, "label", name),
            configs=here.texts(settings, "configs"),
            set=here.mapping(settings, "set"),
            measure=_measure(here, settings),
            x=here.number(settings, "x"),
        )
    return variants


def _measure(where: Where, content: Mapping[str, Any]) -> dict[str, Any]:
    measure = {key: content[key] for key in _MEASURE if key in content}
    if not where.text(measure, "metric", "any"):
        raise where.at("metric").refusal("", "the name of a metric, such as global/acc, or left out")
    if "y_label" in measure:
        measure["y_label"] = where.text(measure, "y_label")
    report = measure.get("report", "last")
    if not is_report(report):
        raise where.at("report").refusal(report, WANTED_REPORT)
    where.choice(measure, "better", ("higher", "lower", "auto"))
    scale, decimals = measure.get("scale", 1), measure.get("decimals", 0)
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if scale != _LOG and not (is_number and scale > 0):
        raise where.at("scale").refusal(scale, f"a positive number or {_LOG}")
    if is_number and not 1 / _MOST_SCALE <= scale <= _MOST_SCALE:
        raise where.at("scale").refusal(scale, f"a number from {1 / _MOST_SCALE:g} to {_MOST_SCALE:g}")
    if isinstance(decimals, bool) or not isinstance(decimals, int) or not 0 <= decimals <= 12:
        raise where.at("decimals").refusal(decimals, "a whole number from 0 to 12")
    return measure


def _seeds(where: Where, seeds: Any) -> tuple[int, ...]:
    whole = isinstance(seeds, list) and all(isinstance(s, int) and not isinstance(s, bool) for s in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds) or not all(0 <= s < 2**32 for s in seeds):
        raise where.refusal(seeds, "a list of distinct whole numbers from 0 to 2³² − 1")
    return tuple(seeds)


def _place(where: Where, word: str, rows: Mapping[str, Any], columns: Mapping[str, Any]) -> Place:
    row, _, column = word.partition("/")
    for name, known, kind in ((row, rows, "row"), (column, columns, "column")):
        if name not in known:
            raise where.error(f"{word}: the {kind} {name!r} does not exist; {meant(name, list(known))}")
    return Place(row, column)


def _published(
    where: Where, content: Mapping[Any, Any], rows: Mapping[str, Any], columns: Mapping[str, Any]
) -> dict[Place, tuple[float, float | None]]:
    published = {}
    for row, values in content.items():
        for column, value in where.at(str(row)).checked(_or_none(values), list(map(str, columns))).items():
            place = _place(where, f"{row}/{column}", rows, columns)
            pair = value if isinstance(value, list) else [value]
            if value is None:
                continue
            if not 1 <= len(pair) <= 2 or not all(isinstance(number, int | float) for number in pair):
                raise where.at(str(place)).refusal(value, "a number, or [mean, standard deviation]")
            published[place] = (float(pair[0]), float(pair[1]) if len(pair) == 2 else None)
    return published
