"""A paper's page: its picture of claims, and which verdicts remain where its questions are taken together."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lit_fed.errors import ConfigError
from lit_fed.studies.pages.claims_picture import drawn
from lit_fed.studies.pages.paper_page import headed, overview, table
from lit_fed.studies.results.register_lines import Row

SVG = "{http://www.w3.org/2000/svg}"


def row(
    sentence: str, ours: float, half: float, verdict: str, published: str = "", limit: str = "", setting: str = "s, x"
) -> Row:
    """A claim over two seeds: with one degree of freedom Student's t is Cauchy's, t₀.₉₇₅ = 12.706."""
    interval, p = f"{ours - half} to {ours + half}", 1 - 2 * math.atan(12.706 * abs(ours) / half) / math.pi
    ran = ("2", "mlp", "Digits", setting, "c", "")
    claim = f"It helps <more> [{sentence}]"
    return Row("p", "Table 1", claim, published, str(ours), interval, limit, str(p), verdict, *ran)


def test_holm_takes_a_pages_questions_together() -> None:
    """Two-sided, P = 1 − 2·arctan(12.706 x)/π for a margin of x halves: 10, 3 and 2 have 0.0050, 0.0167 and 0.0250.

    Holm compares the smallest with 0.05/3 = 0.01667, the next with 0.05/2 = 0.025, and the last with 0.05. A fourth, of
    1.5 halves, has 0.0334. Of four, 0.0050 < 0.0125, and 0.01670 > 0.05/3 = 0.01667 ends it.
    """
    three = [row("a > b", 10, 1, "holds"), row("c > d", -3, 1, "fails"), row("e > f", 2, 1, "holds")]
    text = "\n".join(table(three))
    assert "not by Holm |" not in text
    assert "Of 3 verdicts “holds” or “fails”, 3 remain" in text
    text = "\n".join(table([*three, row("g > h", 1.5, 1, "holds")]))
    assert "| +10.0 ± 1 (2, mlp, Digits, x) | holds |" in text
    assert "| −3.00 ± 1 (2, mlp, Digits, x) | fails, not by Holm |" in text
    assert text.count("not by Holm |") == 3
    assert "Of 4 verdicts “holds” or “fails”, 1 remains where" in text
    assert "second asking" not in text


def test_holm_counts_a_second_asking_as_two_questions() -> None:
    """P = 0.0050, see above. Of 10 questions it is compared with 0.005: P is 0.00501, and is not below."""
    one = row("a > b", 10, 1, "holds")
    for before, verdict in ((0, "holds"), (8, "holds"), (9, "holds, not by Holm")):
        text = "\n".join(table([one], earlier={"s, x": before}))
        assert f"(2, mlp, Digits, x) | {verdict} |" in text
        assert ("1 claim of this page answers a second asking" in text) == (before > 0)


PAGE = """# P

<!-- headline
paper: It is the best.
over b: a > b
over d: c > d
scale: Two seeds.
-->
<!-- headline:begin -->
<!-- headline:end -->

Ours.
"""


def test_a_page_begins_with_its_claim_ours_and_the_verdict() -> None:
    """−3 of 1 half is not below zero by Holm where 10 of 1 is: P = 0.0167 < 0.05, and of 1 + 5 questions > 0.05/5."""
    rows = [row("a > b", 10, 1, "holds", "4"), row("c > d", -3, 1, "fails")]
    text = headed(Path("p.md"), PAGE, rows, {})
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    assert lines == [
        "- **Claimed:** It is the best. Published: over b +4.",
        "- **Ours ± h:** over b +10.0 ± 1 (2, mlp, Digits, x); over d −3.00 ± 1 (2, mlp, Digits, x). "
        "± is a two-sided 95 % interval.",
        "- **Verdict: mixed.** **holds** over b (mlp, x); **fails** over d (mlp, x). Two seeds.",
    ]
    assert text.endswith("<!-- headline:end -->\n\nOurs.\n")
    assert headed(Path("p.md"), text, rows, {}) == text
    assert "**fails, not by Holm** over d" in headed(Path("p.md"), PAGE, rows, {"s, x": 2})
    assert headed(Path("p.md"), "# P\n", rows, {}) == "# P\n"


def test_numbers_under_one_label_have_their_setting_and_a_round_that_the_test_set_chose_is_told() -> None:
    """Two profiles and two studies asked a claim of one network and one data set; 5 + 4 = 9."""
    rows = [
        row("a > b", 4, 1, "holds", "2", limit="5"),
        row("a > b", -4, 1, "fails", limit="5", setting="s, y"),
        row("a > b", 3, 1, "holds", limit="5", setting="other, x"),
        row("c > d", 3, 1, "holds"),
    ]
    text = headed(Path("p.md"), PAGE, rows, {}, {"s, x", "s, y"})
    ours = "+9.00 ± 1, to exceed 5 (2, mlp, Digits, x, s), +1.00 ± 1, to exceed 5 (2, mlp, Digits, y, s), "
    assert f"over b {ours}+8.00 ± 1, to exceed 5 (2, mlp, Digits, x, other)" in text
    assert "Published: over b +7." in text
    assert "**fails, not by Holm** over b (mlp, y, s)." in text
    assert "The test set chose the round of every number of s, x; s, y: these are too high." in text
    assert "The test set" not in headed(Path("p.md"), PAGE, rows, {})


def test_the_overview_counts_what_remains_by_holm() -> None:
    """Of 0.0050, 0.0167, 0.0250 and 0.0334, see above, the first alone; it holds, as two others do."""
    rows = [row("a > b", 10, 1, "holds"), row("c > d", -3, 1, "fails"), row("e > f", 2, 1, "holds")]
    text = "\n".join(overview({"p": "P"}, {"p": [*rows, row("g > h", 1.5, 1, "holds")]}))
    assert "| [P](p.md) | 4 | 4 | 3 | 0 | 0 | 1 | 0 | 1 of 4 |" in text
    assert "Of 3 verdicts “holds” on all pages, 1 remain" in text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("over b: a > c", "p.md: 'a > c' in the headline is not a claim of the page; copy one of its claims"),
        ("a > b", "p.md: 'a > b' in the headline is not 'words: claim'; write both"),
    ],
)
def test_a_headline_that_is_not_on_the_page_is_named(line: str, told: str) -> None:
    rows = [row("a > b", 1, 1, "holds"), row("c > d", 1, 1, "holds")]
    with pytest.raises(ConfigError) as caught:
        headed(Path("p.md"), PAGE.replace("over b: a > b", line), rows, {})
    assert str(caught.value) == told


def test_the_picture_has_a_bar_a_claim_and_the_published_margin() -> None:
    """The largest of −1, 3 and 4 is at the axis' end, 135 pixels from zero at 705: −1 is at 671.25, 3 at 806.25."""
    tree = ElementTree.fromstring(drawn("A & B", [row("a > b", 1, 2, "undecided", "4"), row("c > d", -2, 1, "fails")]))
    paths = [one.attrib["d"] for one in tree.iter(f"{SVG}path")]
    assert paths[0].startswith("M671.2 ")
    assert paths[0].endswith("H806.2")
    assert paths[1].startswith("M840.0 ")  # published
    assert len(paths) == 3
    assert tree.findtext(f"{SVG}title") == "A & B: 1 undecided, 1 fails"
    words = [one.text for one in tree.iter(f"{SVG}text")]
    assert {"It helps <more>", "○ undecided", "■ fails"} <= set(words)
