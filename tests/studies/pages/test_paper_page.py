"""A paper's page: its picture of claims, and which verdicts remain where its questions are taken together."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lit_fed.errors import ConfigError
from lit_fed.studies.pages.claims_picture import drawn
from lit_fed.studies.pages.paper_page import after_holm, headed, overview, table
from lit_fed.studies.results.register_lines import Number, Row

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
says: It is better than b by {s, x: a > b} points, and than d by {s, x: c > d}.
source: A paper, abstract.
scale: Small data.
-->
<!-- headline:begin -->
<!-- headline:end -->

Ours.
"""


def test_a_page_begins_with_what_ran_and_the_papers_sentence_with_our_numbers() -> None:
    """−3 of 1 half is not below zero by Holm where 10 of 1 is: P = 0.0167 < 0.05, and of 1 + 5 questions > 0.05/5."""
    rows = [row("a > b", 10, 1, "holds", "4"), row("c > d", -3, 1, "fails")]
    text = headed(Path("p.md"), PAGE, rows, {})
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    assert lines == [
        "- **What was run:** Digits (mlp); 2 seeds. Small data.",
        "- **What it says of the paper:** It is better than b by +10.0 ± 1 (paper +4; **holds**; 2 seeds, Digits, mlp) "
        "points, and than d by −3.00 ± 1 (**fails**). (A paper, abstract. ± is a two-sided 95 % interval.)",
        "- **All claims, by Holm:** 2 claims of papers: 1 holds, 1 fails.",
    ]
    assert text.endswith("<!-- headline:end -->\n\nOurs.\n")
    assert headed(Path("p.md"), text, rows, {}) == text
    later = headed(Path("p.md"), PAGE, rows, {"s, x": 2})
    assert "than d by −3.00 ± 1 (**undecided**)" in later
    assert "2 claims of papers: 1 holds, 1 undecided." in later
    assert headed(Path("p.md"), "# P\n", rows, {}) == "# P\n"
    bare = [one._replace(network="") for one in rows]
    assert "- **What was run:** Digits; 2 seeds. Small data.\n" in headed(Path("p.md"), PAGE, bare, {})
    with pytest.raises(ConfigError, match=r"^p.md: the page has a headline and no claim; remove the headline$"):
        headed(Path("p.md"), PAGE, [], {})


def test_numbers_of_other_data_have_their_setting_and_a_round_that_the_test_set_chose_is_told() -> None:
    """The margin is told with the number that it must exceed: 5 + 4 = 9, the paper's 2 + 5 = 7."""
    rows = [
        row("a > b", 4, 1, "holds", "2", limit="5"),
        row("c > d", 30, 1, "holds", setting="s, y")._replace(data="Letters", seeds="3"),
        row("Why (ours)", 1, 2, "undecided", setting="s, y")._replace(claim="Why (ours) [e > f]"),
    ]
    page = PAGE.replace("{s, x: c > d}", "{s, y: c > d}")
    text = headed(Path("p.md"), page, rows, {}, {"s, x"})
    assert "by +9.00 ± 1 (paper +7; **holds**; 2 seeds, Digits, mlp) points" in text
    assert "than d by +30.0 ± 1 (**holds**; 3 seeds, Letters, mlp)." in text
    assert "**What was run:** Digits (mlp); Letters (mlp); 2 to 3 seeds." in text
    assert "2 claims of papers: 2 holds; 1 claim of ours: 1 undecided." in text
    assert "The test set chose the round of every number of s, x: these are optimistic." in text
    assert "The test set" not in headed(Path("p.md"), page, rows, {})


def test_a_number_that_diverges_or_is_large_is_told_in_words_and_digits() -> None:
    rows = [row("a > b", 1048, 751, "holds"), row("c > d", 1, 1, "holds")._replace(ours="inf", interval="", p="")]
    text = headed(Path("p.md"), PAGE, rows, {}) + "\n".join(table(rows))
    assert "better than b by +1,050 ± 750 (" in text
    assert "than d by diverges (**holds**)" in text
    assert "| diverges (2, mlp, Digits, x) | holds |" in text
    assert "inf" not in text


def test_the_overview_counts_what_remains_by_holm() -> None:
    """Of 0.0050, 0.0167, 0.0250 and 0.0334, see above, the first alone; a page of our own claims is there, too."""
    rows = [row("a > b", 10, 1, "holds"), row("c > d", -3, 1, "fails"), row("e > f", 2, 1, "holds")]
    ours = [row("a > b", 10, 1, "holds")._replace(claim="Why (ours) [a > b]"), row("g > h", 1.5, 1, "holds")]
    pages = {"p": after_holm([*rows, ours[1]], {}), "q": after_holm(ours[:1], {}), "none": []}
    text = "\n".join(overview({"p": "P", "q": "Q", "none": "None"}, pages))
    assert "| [P](p.md) | Digits (mlp); 2 seeds | 4 | 1 | 0 | 3 | 0 | 0 | – |" in text
    assert "| [Q](q.md) | Digits (mlp); 2 seeds | 0 | 0 | 0 | 0 | 0 | 0 | 1 of 1 |" in text
    assert "none.md" not in text


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("a > b", "a > c", "{s, x: a > c} in the headline is not a claim of the page; copy a claim's setting"),
        ("{s, x: a", "{s, y: a", "{s, y: a > b} in the headline is not a claim of the page; copy a claim's setting"),
        ("scale: ", "size: ", "the headline is not one line each of says, source, scale; write these three"),
        (
            "It is",
            "It is " + "so " * 37 + "much",  # 38 words beside 11 of the sentence, 3 of each number, 5 and 1 in brackets
            "the headline has 61 words with its numbers; shorten it to 60",
        ),
    ],
)
def test_a_headline_that_the_page_cannot_answer_is_named(old: str, new: str, told: str) -> None:
    rows = [row("a > b", 1, 1, "holds"), row("c > d", 1, 1, "holds")]
    with pytest.raises(ConfigError) as caught:
        headed(Path("p.md"), PAGE.replace(old, new), rows, {})
    assert str(caught.value) == f"p.md: {told}"


def test_the_picture_has_a_scale_a_panel_and_rows_by_data_and_network() -> None:
    """The largest of −1, 3, 4 and −3 is at the axis' end, 180 pixels from zero at 825: −1 is at 780, 3 at 960.

    What is measured in percent has another: its largest is 30, of 20 ± 10; 20 is at 945. Ticks are at 2 and at 20.
    """
    rows = [
        row("a > b", 1, 2, "undecided", "4"),
        row("a > b", -2, 1, "fails")._replace(data="Letters"),
        row("c > d at two", 20, 10, "holds"),
        row("e/two > f/two", 1, 1, "holds")._replace(claim="It helps <more> … twice [e/two > f/two]"),
        row("g > h at one", 1, 1, "holds")._replace(claim="Else … too [g > h at one]", ours="inf", interval=""),
    ]
    rows = [one._replace(claim=one.claim.replace("a > b", "a > b at one")) for one in rows]
    measured = {"one": "features/angle_observed, last", "two": "global/acc × 100, last"}
    numbers = [Number("s", "x", "a", column, metric, *[""] * 8) for column, metric in measured.items()]
    tree = ElementTree.fromstring(drawn("A & B", rows, {"s, x": numbers}))
    paths = [one.attrib["d"] for one in tree.iter(f"{SVG}path")]
    assert paths[0].startswith("M780.0 ")
    assert paths[0].endswith("H960.0")
    assert paths[1].startswith("M1005.0 ")  # published
    assert paths[2].startswith("M690.0 ")
    assert paths[3].endswith("H1005.0")
    assert len(paths) == 5
    assert [one.attrib["cx"] for one in tree.iter(f"{SVG}circle")] == ["870.0", "735.0", "945.0", "831.0"]
    assert tree.findtext(f"{SVG}title") == "A & B: 3 holds, 1 undecided, 1 fails"
    words = [one.text for one in tree.iter(f"{SVG}text")]
    assert {"It helps <more>", "Digits, mlp", "Letters, mlp", "○ undecided", "■ fails"} <= set(words)
    assert [word for word in words if word and word.startswith("Table 1")] == [
        "Table 1: features/angle",
        "Table 1: points",
    ]
    assert words.count("It helps <more>") == 2, "a claim is told once, whatever settings asked it"
    assert {"… twice", "Else … too"} <= set(words), "what continues no claim above is told whole"
    assert [word for word in words if word in ("−2", "0", "2", "−20", "20")] == ["−2", "0", "2", "−20", "0", "20"]
