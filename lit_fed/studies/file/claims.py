"""A paper's claims as sentences that are checked over seeds.

The grammar, in words separated by spaces:

.. code-block:: text

    claim    sum (> sum)+ [at names]         feddr_plus > fedprox > fedavg at s=2 s=10
             sum (< sum)+ [at names]         fd_avg + 0.02 < suwa at k=2
             place rises|falls [by number] [from round] [to round] [at names]
                                             frozen falls by 0.1 from 5 to 10 at rho=2
    sum      term [(+|-) term] …
    term     number, place or number*place                86*suwa
    place    row/column, or one of the two if ``at`` or a table of one column gives the other

With several names after ``at``, the claim must hold at each of them. A claim is decided from one number per seed (see
`Link`) and the confidence interval of its mean (see `decide`). It may come with ``equal``, the margin within which two
sides count as equal, which is fixed before anything runs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import comb
from typing import Any

import numpy as np

from lit_fed.errors import ConfigError
from lit_fed.studies.file.rounds import WANTED_REPORT, Curve, is_report

WORDS = (">", "<", "+", "-", "−", "at", "rises", "falls", "by", "from", "to")
UNDECIDED = "undecided"
NOT_APPLICABLE = "not applicable"
OUTCOMES = ("holds", "equal", UNDECIDED, "fails", NOT_APPLICABLE)  # the first four from the best to the worst
HOW_DECIDED = (
    "The difference is the mean over seeds of what a claim says is greater minus what it says is smaller, or the "
    "change of a curve; ± t·s/√n is its two-sided 95 % confidence interval, and beside it is the number that it "
    "must exceed, if this is not zero. A claim holds where the interval lies above this number, fails where it lies "
    "below, is equal where a margin of equality is fixed beside it and neither end lies as far from the number, is not "
    "applicable where the study file says why it cannot be asked at this scale, and is undecided else. A claim of "
    "several inequalities holds where all of them do; it fails where one of k does at 5 %/k, so that where nothing "
    "differs, no more than 5 % of claims are decided. “Not by Holm” marks what holds or fails by its own test, and "
    "does not remain where all claims of the study, or of the page, are taken together at 5 %."
)
LEVEL = 0.05
"""Probability that a claim is decided where nothing differs: half of it for “holds”, half for “fails”."""
_TEXTS = ("claim", "says", "metric", "report", "cause", "not_applicable")
_NUMBERS = ("equal", "published")

ValueOf = Callable[[tuple[str, str], int], float | None]  # of a place and a seed
CurveOf = Callable[[tuple[str, str], int], Curve]


@dataclass(frozen=True)
class Link:
    """One inequality: the sum of ``weight · value`` over places, minus `limit`, is above zero.

    Args:
        terms: Weights and places (row, column).
        limit: The number that the sum must exceed.
        change: Use the rise of a place's curve as its value: the mean over the last third of its evaluated rounds minus
            the mean over the first third.
        first: First round of the curve.
        last: Last round of the curve.
        text: The inequality in words.
    """

    terms: tuple[tuple[float, tuple[str, str]], ...]
    limit: float = 0.0
    change: bool = False
    first: int = 0
    last: int | None = None
    text: str = field(default="", compare=False)


@dataclass(frozen=True)
class Claim:
    """A paper's claim, and the inequalities that must all hold.

    Args:
        text: The claim in the study file's grammar.
        says: The paper's wording.
        metric: The metric, if it differs from the table's.
        report: The round that counts, if it differs from the table's.
        links: The inequalities.
        equal: Sides that differ by less than this are equal, in the unit of the column; None rules this outcome out.
        published: The paper's margin beyond the limit, if it does not follow from the table.
        cause: Why the claim does not hold, as an experiment showed.
        not_applicable: Why the claim cannot be asked in this setting; empty if it can.
    """

    text: str
    says: str
    metric: str | None
    report: str | None
    links: tuple[Link, ...]
    equal: float | None = None
    published: float | None = None
    cause: str = ""
    not_applicable: str = ""

    @property
    def sentence(self) -> str:
        """The claim, with its metric and round if they differ from the table's."""
        return ", ".join(part for part in (self.text, self.metric, self.report) if part)

    @property
    def places(self) -> list[tuple[str, str]]:
        """The places in the claim, without duplicates."""
        return list(dict.fromkeys(place for link in self.links for _, place in link.terms))


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim.

    Args:
        outcome: One of `OUTCOMES`.
        margin: Mean over seeds of the margin beyond the limit, for the worst link.
        spread: Half width of the two-sided 95 % confidence interval of `margin`; None with fewer than two seeds.
        seeds: The number of seeds with all values that the claim needs.
        note: Why the claim is undecided, and which link is the worst.
        link: The worst link, to which the numbers belong.
        difference: Mean over seeds without subtracting the limit.
        p: Two-sided p-value of the claim; None without one.
    """

    outcome: str
    margin: float | None = None
    spread: float | None = None
    seeds: int = 0
    note: str = ""
    link: Link | None = field(default=None, compare=False)
    difference: float | None = None
    p: float | None = None

    @property
    def rank(self) -> tuple[int, float]:
        """The order of inequalities, from the worst on: by outcome, then by the margin in units of its spread."""
        margin = float("-inf") if self.margin is None else self.margin
        return -OUTCOMES.index(self.outcome), margin / self.spread if self.spread else margin


# ---------------------------------------------------------------------- checking


def decide(differences: Sequence[float], equal: float | None = None, inequalities: int = 1) -> Verdict:
    """Decide the inequality d > 0 from one difference d per seed.

    With n seeds, mean m and sample standard deviation s (n − 1), the spread is h = t·s/√n, where t is the 97.5 %
    quantile of Student's t with n − 1 degrees of freedom. The inequality holds if m − h > 0, fails if m + h < 0, and is
    undecided in between: a two-sided test at 5 %. One seed has no spread and decides nothing. A claim of k inequalities
    holds if each one does, and fails if one does; an inequality of it therefore fails if its two-sided p-value is
    at most 0.05/k (Bonferroni), so that where nothing differs the claim holds or fails in at most 5 % of all cases.

    If a value is infinite, as after divergence, there is no mean, and the sign test decides, also at 5 %: with n seeds,
    a of them above zero, the p-value is 2·Σ_{i≥a} C(n, i)/2^n, which is below 0.05 for six of six or nine of ten; it
    fails if equally many are below zero. Zero and NaN count for neither side.

    An undecided claim is ``equal`` if −e < m − h and m + h < e: two one-sided t tests at 2.5 %, of d ≤ −e and of d ≥ e,
    both reject (Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for assessing the
    equivalence of average bioavailability", 1987).

    Args:
        differences: One value per seed.
        equal: e; None rules the outcome ``equal`` out.
        inequalities: k, of the claim.
    """
    count = len(differences)
    if not count:
        return Verdict(UNDECIDED, note="no seed has finished")
    values = np.asarray(differences, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # of ∞ and −∞
        mean = float(values.mean())
    if not np.isfinite(values).all():
        sides = ("holds", "above", values > 0, 1), ("fails", "below", values < 0, inequalities)
        for outcome, side, there, k in sides:
            agree = int(there.sum())
            p = min(1.0, 2 * k * sum(comb(count, more) for more in range(agree, count + 1)) / 2**count)
            if p <= LEVEL:
                return Verdict(outcome, mean, None, count, f"a value is not finite, and {agree} are {side} zero", p=p)
        return Verdict(UNDECIDED, mean, None, count, "a value is not finite")
    if count == 1:
        return Verdict(UNDECIDED, mean, None, 1, "one seed has no spread")
    from scipy.stats import t  # takes a second to import

    error = float(values.std(ddof=1)) / count**0.5
    spread = float(t.ppf(1 - LEVEL / 2, count - 1)) * error
    two_sided = 2 * float(t.sf(abs(mean) / error, count - 1)) if error else float(mean == 0)
    p = min(1.0, two_sided * (inequalities if mean < 0 else 1))
    if p <= LEVEL:
        return Verdict("holds" if mean > 0 else "fails", mean, spread, count, p=p)
    if equal is not None and abs(mean) + spread < equal:
        return Verdict("equal", mean, spread, count, f"within {equal:g}", p=p)
    return Verdict(UNDECIDED, mean, spread, count, "within the spread", p=p)


def check(claim: Claim, seeds: Sequence[int], value: ValueOf, curve: CurveOf) -> Verdict:
    """Check a claim; of several inequalities, the worst decides.

    Args:
        claim: The claim.
        seeds: The seeds of the study; seeds with all places of the claim count, paired.
        value: Returns the value of (place, seed); None if missing.
        curve: Returns the `Curve` of (place, seed); empty if missing.
    """
    verdicts = []
    for link in claim.links:
        sums_by_seed = []
        for seed in seeds:
            parts = [_part(link, place, seed, value, curve) for _, place in link.terms]
            known = [part for part in parts if part is not None]
            if len(known) == len(parts):
                sums = sum(weight * part for (weight, _), part in zip(link.terms, known, strict=True))
                sums_by_seed.append(sums)
        verdict = decide([sums - link.limit for sums in sums_by_seed], claim.equal, len(claim.links))
        with np.errstate(invalid="ignore"):  # of ∞ and −∞
            verdict = replace(verdict, link=link, difference=float(np.mean(sums_by_seed)) if sums_by_seed else None)
        if 0 < len(sums_by_seed) < len(seeds) and not verdict.note:
            verdict = replace(verdict, note="some seeds are missing")
        if len(claim.links) > 1:
            verdict = replace(verdict, note="; ".join(part for part in (verdict.note, f"at worst {link.text}") if part))
        verdicts.append(verdict)
    worst = min(verdicts, key=lambda verdict: verdict.rank)
    return replace(worst, outcome=NOT_APPLICABLE) if claim.not_applicable else worst


def rejected(chances: Sequence[float], questions: int) -> int:
    """Return how many of some p-values, the smallest first, remain where all questions are taken together at 5 %.

    The smallest is compared with 0.05/n, the next with 0.05/(n − 1), and so on until one is larger (Holm, "A simple
    sequentially rejective multiple test procedure", 1979).

    Args:
        chances: The p-values, in ascending order.
        questions: n, which is larger than their number where some questions had larger p-values before.
    """
    small = (chance <= LEVEL / (questions - number) for number, chance in enumerate(chances))
    return sum(itertools.takewhile(bool, small))


def by_holm(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Note beside what holds or fails whether it does not remain where all verdicts are taken together."""
    chances = sorted(verdict.p for verdict in verdicts if verdict.p is not None)
    count = rejected(chances, len(chances))
    apart = set(chances[count:])  # of equal p-values all remain or none, as bounds grow
    return [
        replace(verdict, note="; ".join(filter(None, (verdict.note, "not by Holm"))))
        if verdict.outcome in ("holds", "fails") and verdict.p in apart
        else verdict
        for verdict in verdicts
    ]


def outcome_counts(outcomes: Iterable[str]) -> str:
    """Return the number of verdicts by outcome, as a text."""
    counts = Counter(outcomes)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])


def _part(link: Link, place: tuple[str, str], seed: int, value: ValueOf, curve: CurveOf) -> float | None:
    if not link.change:
        return value(place, seed)
    inside = [v for r, v in curve(place, seed) if r >= link.first and (link.last is None or r <= link.last)]
    return rise(inside)


def rise(values: Sequence[float]) -> float | None:
    """Return the rise of a curve: the mean of the last third minus the mean of the first; None below two values."""
    if len(values) < 2:
        return None
    third = max(1, len(values) // 3)
    return float(np.mean(values[-third:]) - np.mean(values[:third]))


# ---------------------------------------------------------------------- reading


def parse_claim(
    content: Any, where: str, rows: Sequence[str], columns: Sequence[str], skip: Collection[tuple[str, str]] = ()
) -> Claim:
    """Parse a claim: a text, or a mapping with ``claim`` and further keys of `Claim`.

    Args:
        content: The entry of the study file.
        where: The place that errors name.
        rows: Names of the rows.
        columns: Names of the columns.
        skip: Places without runs.
    """
    entry: Mapping[str, Any] = {"claim": content} if isinstance(content, str) else content
    if not isinstance(entry, dict) or not isinstance(entry.get("claim"), str):
        raise ConfigError(
            f"{where} is {content!r}; it must be a text such as 'a > b at c', or a mapping with claim, says, metric "
            "and report"
        )
    for key, value in entry.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (key in _TEXTS and isinstance(value, str)) and not (key in _NUMBERS and number):
            raise ConfigError(
                f"{where}: {key!r} must be a text named {', '.join(_TEXTS)}, or a number named {' or '.join(_NUMBERS)}"
            )
    text = " ".join(entry["claim"].split())
    reader = _Reader(text, f"{where}, {text!r}", rows, columns, skip)
    report = entry.get("report", "last")
    if not is_report(report):
        raise ConfigError(f"{where}: report is {report!r}; it must be {WANTED_REPORT}")
    if not (equal := entry.get("equal", 1.0)) > 0:
        raise ConfigError(f"{where}: equal is {equal:g}; it must be above 0")
    says, *why = (" ".join(entry.get(key, "").split()) for key in ("says", "cause", "not_applicable"))
    links = tuple(reader.links())
    return Claim(
        text, says, entry.get("metric"), entry.get("report"), links, entry.get("equal"), entry.get("published"), *why
    )


class _Reader:
    """Parses one claim."""

    def __init__(
        self, text: str, where: str, rows: Sequence[str], columns: Sequence[str], skip: Collection[tuple[str, str]]
    ) -> None:
        self.where, self.rows, self.columns, self.skip = where, rows, columns, skip
        words = text.replace("−", "-").replace(",", " ").split()
        self.words, self.places = words, [""]
        if "at" in words:
            at = words.index("at")
            self.words, self.places = words[:at], words[at + 1 :]
            if not self.places:
                raise self.error("a row or column is missing after 'at'")

    def error(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.where}: {reason}")

    def links(self) -> list[Link]:
        for word in ("rises", "falls"):
            if word in self.words:
                return [self.shape(word, at) for at in self.places]
        signs = {word for word in self.words if word in "<>"}
        if len(signs) != 1:
            raise self.error(
                "the claim mixes > and <; use one of them" if signs else "write a > b, a < b, or a rises or a falls"
            )
        parts: list[list[str]] = [[]]
        for word in self.words:
            if word in signs:
                parts.append([])
            else:
                parts[-1].append(word)
        if signs == {"<"}:
            parts.reverse()
        pairs = list(itertools.pairwise(parts))
        return [self.greater(left, right, at) for at in self.places for left, right in pairs]

    def greater(self, left: list[str], right: list[str], at: str) -> Link:
        (more, number), (less, other) = self.sum(left, at), self.sum(right, at)
        terms = (*more, *((-weight, place) for weight, place in less))
        if not terms:
            raise self.error("it names neither a row nor a column")
        text = f"{' '.join(left)} > {' '.join(right)}" + (f" at {at}" if at else "")
        return Link(terms, limit=other - number, text=text)

    def sum(self, words: list[str], at: str) -> tuple[list[tuple[float, tuple[str, str]]], float]:
        if len(words) % 2 == 0 or any(word not in "+-" for word in words[1::2]):
            raise self.error(
                f"{' '.join(words) or 'nothing'!r} is not a sum; join names and numbers with + or - in between"
            )
        terms, number = [], 0.0
        for sign, word in zip(["+", *words[1::2]], words[::2], strict=True):
            weight = 1.0 if sign == "+" else -1.0
            factor, _, name = word.rpartition("*")
            if (times := 1.0 if not factor else number_in(factor)) is None:
                raise self.error(f"{factor!r} in {word!r} is not a number; write it as in 3*{name}")
            if (value := number_in(name)) is not None:
                number += weight * times * value
            else:
                terms.append((weight * times, self.place(name, at)))
        return terms, number

    def shape(self, word: str, at: str) -> Link:
        before, after = self.words[: self.words.index(word)], self.words[self.words.index(word) + 1 :]
        if len(before) != 1:
            raise self.error(f"write one row or column before {word!r}")
        given = {"by": 0.0, "from": 0.0, "to": None}
        while after:
            if after[0] not in given or len(after) < 2:
                raise self.error(f"{' '.join(after)!r} follows {word!r}; write by, from or to with a number")
            if (number := number_in(after[1])) is None:
                raise self.error(f"{after[1]!r} follows {after[0]!r}; write a number")
            given[after[0]], after = number, after[2:]
        first, last = int(given["from"] or 0), None if given["to"] is None else int(given["to"])
        if last is not None and last <= first:
            raise self.error(f"the curve from round {first} to {last} is empty; end it after its first round")
        sign = 1.0 if word == "rises" else -1.0
        terms, text = ((sign, self.place(before[0], at)),), f"{before[0]} {word}" + (f" at {at}" if at else "")
        return Link(terms, given["by"] or 0.0, change=True, first=first, last=last, text=text)

    def place(self, word: str, at: str) -> tuple[str, str]:
        row, _, column = word.partition("/")
        if at and not column and at in self.rows and word in self.columns:
            row, column = at, word
        elif not column:
            column = at or (self.columns[0] if len(self.columns) == 1 else "")
            if not column:
                raise self.error(f"{word!r} has several columns; end it with 'at' and one of {', '.join(self.columns)}")
        for name, known, kind in ((row, self.rows, "row"), (column, self.columns, "column")):
            if name not in known:
                raise self.error(
                    f"the {kind} {name!r} does not exist; {meant(name, known, [*self.rows, *self.columns])}"
                )
        if (row, column) in self.skip:
            raise self.error(f"{row}/{column} is skipped, so it has no runs")
        return row, column


def number_in(word: str) -> float | None:
    """Return a word's number; None for another word."""
    try:
        return float(word)
    except ValueError:
        return None


def meant(word: str, known: Sequence[str], similar: Sequence[str] = ()) -> str:
    """Return the end of an error about an unknown word: the closest one, of further ones too, or all known ones."""
    close = get_close_matches(word, similar or known, n=1)
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}"
