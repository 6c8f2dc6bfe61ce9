"""What a study is: rows, columns, seeds, a measure, the published values and the paper's claims, read from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log10, nan
from pathlib import Path
from typing import Any, NamedTuple

from lit_fed.command.reading.readable import read_settings
from lit_fed.command.reading.shipped import located
from lit_fed.command.reading.values import check_values
from lit_fed.engine.lightning.metric_names import MetricNames
from lit_fed.file_names import is_file_name
from lit_fed.studies.claims import Claim, parse_claim
from lit_fed.studies.rounds import wrong_report
from lit_fed.studies.sweep import unrolled
from lit_fed.studies.where import Where, meant

_MOST_SCALE = 1e12  # bytes in millions of millions; what is beyond shows zeros or noise
_MEASURE = ("metric", "report", "better", "scale", "decimals")
_LOG = "log10"
_VARIANT = ("label", "x", "configs", "set", "grid", *_MEASURE)
_STUDY = (
    *("title", "source", "about", "configs", "set", "grid", *_MEASURE, "seeds", "rows", "columns", "skip"),
    *("published", "claims", "x_label", "pictures", "profiles"),
)
_PROFILE = (*(key for key in _STUDY if key != "profiles"), "again")
_AGAIN = ("again", "about", "seeds", "rows", "columns", "skip", "claims")
PLAIN = "default"
"""The profile of a study that has none."""


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
    """What is read from a run.

    Args:
        metric: A column of ``metrics.csv``, such as ``global/acc``; empty where the study names none and what a run
            monitors is only known once one has finished.
        report: The ``last`` evaluated round, the ``best`` one, the ``mean`` over all of them, or the ``best of``
            another metric, see `lit_fed.studies.rounds.reported`.
        lower: Whether smaller values are better.
        scale: Values are multiplied by this everywhere: in tables, pictures and claims.
        decimals: Digits after the point in tables.
        log: Instead of scaling them, take their decimal logarithm, for values that span decades.
    """

    metric: str
    report: str = "last"
    lower: bool = False
    scale: float = 1.0
    decimals: int = 4
    log: bool = False

    @property
    def words(self) -> str:
        """The metric, and what is done to its values."""
        if self.log:
            return f"log10 of {self.metric}"
        return self.metric + ("" if self.scale == 1 else f" × {self.scale:g}")

    def shown(self, value: float) -> float:
        """A value as it stands in tables, pictures and claims; a logarithm of what is not above 0 is not a number."""
        if self.log:
            return log10(value) if value > 0 else nan
        return self.scale * value


@dataclass(frozen=True)
class Variant:
    """A row or a column: what it adds to the study's base.

    Args:
        name: Its name in folders and claims.
        label: What tables and pictures call it.
        configs: Configuration files, merged after those before.
        set: Single settings by dotted key.
        measure: Keys of the study's measure that are another one here.
        x: Where it stands on the axis of a picture with lines; None where it stands nowhere.
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
        name: Name of the file without its ending.
        path: The file.
        profile: Name of the profile.
        title: One line that says what is compared.
        source: The paper, and the table or figure.
        about: What a reader must know.
        configs: Configuration files that every cell begins with.
        set: Single settings of every cell.
        seeds: Seeds; each is a run of its own.
        rows: Rows of the table by name, usually methods.
        columns: Columns of the table by name, usually settings or metrics.
        skip: Places that stay empty.
        published: The paper's value by place, and its standard deviation or None.
        claims: What the paper says.
        measure: What is read from a run where neither row nor column says otherwise.
        again: The profile of which this one asks some claims again, over other seeds; empty for none.
        x_label: What the places of rows or columns on an axis (`Variant.x`) are.
        pictures: Pictures of the runs that the report shows, by their names in TensorBoard.
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
    x_label: str = ""
    pictures: tuple[str, ...] = ()

    @property
    def called(self) -> str:
        """Its name, and the profile where it has profiles."""
        return self.name if self.profile == PLAIN else f"{self.name}, profile {self.profile}"

    @property
    def places(self) -> list[Place]:
        """The places that are filled, row by row."""
        every = (Place(row, column) for row in self.rows for column in self.columns)
        return [place for place in every if place not in self.skip]

    def names_metric(self, place: Place) -> bool:
        """Whether the study says which metric is read at a place."""
        row, column = self.rows[place.row], self.columns[place.column]
        return "metric" in {**self.measure, **row.measure, **column.measure}

    def measure_of(
        self, place: Place, names: MetricNames, metric: str | None = None, report: str | None = None
    ) -> Measure:
        """What is read from the runs of a place.

        Args:
            place: The place.
            names: What is known of its runs' metrics: the monitor counts where the study names no metric.
            metric: The metric that a claim asks for, where it does.
            report: The round that a claim asks for, where it does.
        """
        row, column = self.rows[place.row], self.columns[place.column]
        keys = {"metric": names.monitor or ""} | dict(self.measure) | dict(row.measure) | dict(column.measure)
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
        )


def read_study(path: str | Path, profile: str | None = None) -> Study:
    """Read a study file and apply a profile to it.

    A profile is laid over the rest of the file: rows, columns, published values and mappings of settings key by key,
    anything else as a whole. A row, a column or a published value of null is left out. A profile that says ``again`` is
    laid over the one it names, of which it may leave out rows and columns, and has seeds and claims of its own.

    Args:
        path: The file.
        profile: ``paper``, ``pocket``, or another one that the file has; None for the file as it is where it has none,
            else for ``pocket``, else for the only one.

    Raises:
        ConfigError: If the file cannot be read, has a key or name that does not exist, or lacks the profile.
    """
    path = Path(located(path))
    content = read_settings(path, "study file", "holds no study; write keys such as rows:, columns: and metric:")
    check_values(content, where=f"{path}: ")
    where = Where(str(path))
    where.check_keys(content, _STUDY)
    profiles = where.mapping(content, "profiles")
    name = _chosen(where, profiles, profile)
    over = where.at(f"profiles.{name}").checked(_or_none(profiles.get(name)), _PROFILE)
    below = {key: value for key, value in content.items() if key != "profiles"}
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
    """The file with the profile of which another one asks claims again: the same runs, over other seeds.

    Args:
        where: The file's place, for errors.
        file: What stands outside of profiles.
        profiles: All of them.
        name: The one that asks.
        over: What it says.
        later: The seeds of those that ask it again in turn, by their names.

    Raises:
        ConfigError: If there is nothing to ask again, or more than the seeds would differ, or a seed is the same.
    """
    here, first = where.at(f"profiles.{name}"), where.text(over, "again")
    below = where.at(f"profiles.{first}").checked(_or_none(profiles.get(first)), _PROFILE)
    asked = below.get("seeds", file.get("seeds", [0]))
    asking = {**(later or {}), name: over.get("seeds", asked)}
    if first not in profiles or first in asking:
        raise here.at("again").error(f"there is no profile {first!r} with runs of its own")
    here.check_keys(over, _AGAIN)
    for key in ("rows", "columns"):
        if kept := [one for one, value in where.mapping(over, key).items() if value is not None]:
            raise here.at(key).error(f"{kept[0]!r} is to be what it is in {first!r}; it may only be left out, by null")
    for one, seeds in asking.items():
        lists = isinstance(seeds, list) and isinstance(asked, list)
        if lists and (common := [seed for seed in seeds if seed in asked]):
            at = where.at(f"profiles.{one}.seeds")
            raise at.error(f"{first!r} has seed {common[0]} too; to ask again takes other seeds")
    before = _first_asked(where, file, profiles, first, below, asking) if "again" in below else dict(file)
    found: dict[str, Any] = _merge(before, below)
    return found


def _chosen(where: Where, profiles: Mapping[Any, Any], wanted: str | None) -> str:
    """The profile to apply."""
    if wanted is None:
        known = list(map(str, profiles)) or [PLAIN]
        if "pocket" not in known and len(known) > 1:
            raise where.error(f"which profile? choose one of {', '.join(known)} with --profile")
        wanted = "pocket" if "pocket" in known else known[0]
    if not is_file_name(wanted):
        raise where.error(f"a profile cannot be called {wanted!r}: it names a folder; call it as you would a file")
    if wanted not in profiles and (profiles or wanted != PLAIN):
        there = ", ".join(map(str, profiles)) or "none, so leave --profile out"
        raise where.error(f"there is no profile {wanted!r}; the file has {there}")
    return wanted


def _or_none(value: Any) -> Any:
    """A mapping, of which nothing after the key means none."""
    return {} if value is None else value


def _merge(below: Any, over: Any) -> Any:
    """Mappings key by key, anything else as a whole."""
    if not (isinstance(below, dict) and isinstance(over, dict)):
        return over
    return below | {key: _merge(below[key], value) if key in below else value for key, value in over.items()}


def _build(path: Path, profile: str, content: dict[str, Any], where: Where) -> Study:
    rows = _variants(where.at("rows"), where.mapping(content, "rows"))
    columns = _variants(where.at("columns"), where.mapping(content, "columns"))
    if not rows:
        raise where.error("rows are missing; name at least one, or sweep a setting with grid")
    measure = _measure(where, content)
    columns = columns or {"all": Variant("all", str(measure.get("metric", "result")))}
    if both := [name for name in rows if name in columns]:
        raise where.error(f"{both[0]!r} is a row and a column; claims could not tell them apart, rename one")
    skip = frozenset(_place(where.at("skip"), word, rows, columns) for word in where.texts(content, "skip"))
    claims = [] if content.get("claims") is None else content["claims"]
    if not isinstance(claims, list):
        raise where.at("claims").error("expected a list")
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
        x_label=where.text(content, "x_label"),
        pictures=where.texts(content, "pictures"),
    )
    if not study.places:
        raise where.error("every place of the table is skipped")
    return study


def _variants(where: Where, content: Mapping[Any, Any]) -> dict[str, Variant]:
    variants = {}
    for key, value in content.items():
        if value is None:
            continue
        name, here = where.name(key), where.at(str(key))
        settings = here.checked(value, _VARIANT)
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
        raise where.at("metric").error("expected the name of a metric, such as global/acc, or no key")
    if wrong := wrong_report(measure.get("report", "last")):
        raise where.at("report").error(wrong)
    where.choice(measure, "better", ("higher", "lower", "auto"))
    scale, decimals = measure.get("scale", 1), measure.get("decimals", 0)
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if scale != _LOG and not (is_number and scale > 0):
        raise where.at("scale").error(f"expected a positive number or {_LOG}, not {scale!r}")
    if is_number and not 1 / _MOST_SCALE <= scale <= _MOST_SCALE:
        raise where.at("scale").error(f"expected a number from {1 / _MOST_SCALE:g} to {_MOST_SCALE:g}, not {scale!r}")
    if isinstance(decimals, bool) or not isinstance(decimals, int) or not 0 <= decimals <= 12:
        raise where.at("decimals").error(f"expected a whole number from 0 to 12, not {decimals!r}")
    return measure


def _seeds(where: Where, seeds: Any) -> tuple[int, ...]:
    whole = isinstance(seeds, list) and all(isinstance(s, int) and not isinstance(s, bool) for s in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds) or not all(0 <= s < 2**32 for s in seeds):
        raise where.error(f"expected a list of different whole numbers, not {seeds!r}; 0 ≤ seed < 2³²")
    return tuple(seeds)


def _place(where: Where, word: str, rows: Mapping[str, Any], columns: Mapping[str, Any]) -> Place:
    row, _, column = word.partition("/")
    for name, known, kind in ((row, rows, "row"), (column, columns, "column")):
        if name not in known:
            raise where.error(f"{word}: there is no {kind} {name!r}; {meant(name, list(known))}")
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
                raise where.error(f"{place}: expected a number, or [mean, standard deviation], not {value!r}")
            published[place] = (float(pair[0]), float(pair[1]) if len(pair) == 2 else None)
    return published
