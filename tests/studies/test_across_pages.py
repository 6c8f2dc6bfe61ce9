"""What a study writes beside its Markdown: LaTeX, SVG, pages that grow, and what all of them say of failed cells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.studies.pages import figures
from lit_fed.studies.pages.report import index_html, report_html
from lit_fed.studies.results.register_lines import OURS
from lit_fed.studies.results.results import collect, escaped, table_csv, table_latex, table_markdown
from lit_fed.studies.results.summary import summaries_in, summary_json, summary_of
from lit_fed.studies.run_studies import _summarise, _write_all
from lit_fed.studies.running.cells import CellGrid
from tests.studies.support import TINY, finish, grid_of

EVIL = "<script>alert('a')</script> & \"b\""


def shown(grid: CellGrid, row: str, column: str, seed: int, value: float) -> None:
    finish(grid, row, column, seed, f"round,global/acc\n0,0.1\n1,{value}\n")


def fail(grid: CellGrid, row: str, seed: int, reason: str = "its loss is not finite") -> None:
    cell = next(cell for cell in grid.cells if (cell.row, cell.seed) == (row, seed))
    cell.write_record(status="failed", error=reason)


# ---------------------------------------------------------------------- failed cells


def test_failed_cells_say_so_in_every_table(tmp_path: Path) -> None:
    rows = {name: TINY["rows"]["prox"] | {"set": {"algorithm.init_args.mu": mu}} for mu, name in enumerate("abcd")}
    grid = grid_of(tmp_path, rows=rows, seeds=[0, 1], decimals=2)
    shown(grid, "a", "iid", 0, 0.5)
    fail(grid, "a", 1)
    fail(grid, "b", 0)
    fail(grid, "b", 1)
    fail(grid, "c", 1)
    results = collect(grid)
    told = [entry.ours for entry in results.entries.values()]
    assert told == ["0.50 (1 of 2 seeds, 1 failed)", "failed", "– (1 of 2 seeds failed)", "–"]
    assert all(f"| {text} |" in table_markdown(results) for text in told)
    assert "b & failed \\\\" in table_latex(results)
    assert [line.rpartition(",")[2] for line in table_csv(results).splitlines()] == ["failed", "1", "2", "1", "0"]
    html = report_html(results, [])
    assert html.count("its loss is not finite") == 4, "each is listed, whenever it was run"
    assert "1 of 8 cells finished, 4 failed" in html


def test_what_failed_with_other_settings_has_not_failed(tmp_path: Path) -> None:
    fail(grid_of(tmp_path), "prox", 0)
    changed = grid_of(tmp_path, set=TINY["set"] | {"trainer.local_steps": 3})
    assert [entry.ours for entry in collect(changed).entries.values()] == ["–", "–"]


# ---------------------------------------------------------------------- LaTeX


def test_the_table_as_latex_by_hand(tmp_path: Path) -> None:
    # 50 and 60 %: mean 55, s = √(2·5²) = 7.07; 70 and 82 %: mean 76, s = √(2·6²) = 8.49.
    rows = {name: {**TINY["rows"][name], "label": f"{name}_μ & 5 %"} for name in ("fedavg", "prox")}
    grid = grid_of(tmp_path, rows=rows, scale=100, decimals=1, seeds=[0, 1], published={"prox": {"iid": [80, 2]}})
    for row, values in (("fedavg", (0.5, 0.6)), ("prox", (0.7, 0.82))):
        for seed, value in enumerate(values):
            shown(grid, row, "iid", seed, value)
    lines = table_latex(collect(grid)).splitlines()
    assert lines[1:9] == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"& iid \\",
        r"\midrule",
        r"fedavg\_$\mu$ \& 5 \% & 55.0 $\pm$ 7.1 \\",
        r"prox\_$\mu$ \& 5 \% & \textbf{76.0 $\pm$ 8.5} (80 $\pm$ 2) \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    assert all(line.startswith("% ") for line in (lines[0], *lines[9:]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a_b%c#d&e{f}$", r"a\_b\%c\#d\&e\{f\}\$"),
        ("x^2~\\", r"x\textasciicircum{}2\textasciitilde{}\textbackslash{}"),
        ("α λ Μ Λ Σ ς ο", r"$\alpha$ $\lambda$ M $\Lambda$ $\Sigma$ $\varsigma$ o"),
        ("−1 ≤ x – 8×8 ±", r"$-$1 $\leq$ x -- 8$\times$8 $\pm$"),
        ("Zürich ά", "Zürich ά"),
    ],
)
def test_latex_prints_any_text_as_it_is(text: str, expected: str) -> None:
    assert escaped(text) == expected


# ---------------------------------------------------------------------- pages


def test_all_that_goes_into_a_page_is_escaped(tmp_path: Path) -> None:
    rows = {name: {**TINY["rows"][name], "label": EVIL} for name in ("fedavg", "prox")}
    columns = {"iid": {**TINY["columns"]["iid"], "label": EVIL}}
    claims = [{"claim": "prox > fedavg", "says": EVIL}]
    words = {"title": EVIL, "about": EVIL, "source": EVIL}
    grid = grid_of(tmp_path, rows=rows, columns=columns, claims=claims, **words)
    fail(grid, "prox", 0, EVIL)
    results = collect(grid)
    html = report_html(results, []) + index_html([summary_of(results)], "pocket")
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(&#39;a&#39;)&lt;/script&gt; &amp; &#34;b&#34;") >= 11


def test_the_page_of_studies_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lit_fed.callbacks.progress import plain_console

    claims = ["prox > fedavg"]
    for number, name in enumerate(("second", "first")):  # one run after the other, as on two days
        grid = grid_of(tmp_path, name, title=f"the {name} study", claims=claims)
        shown(grid, "fedavg", "iid", 0, 0.5)
        results = collect(grid)
        _write_all(results)
        _summarise([results], tmp_path / "out", plain_console(140))
        page = (tmp_path / "out/index.pocket.html").read_text()
        assert re.findall(r'href="(\w+)/pocket/report.html"', page) == sorted(["second", "first"][: number + 1])
        assert ("1 claim of ours", "2 claims of ours")[number] in page
    assert "1 study: 1 claim of ours" in capsys.readouterr().out, "the terminal tells of the study that has run"
    assert (tmp_path / "out/claims.pocket.md").read_text().count("`prox > fedavg`") == 2
    (first, second) = summaries_in(tmp_path / "out", "pocket")
    assert (first.name, first.cells, first.done, first.tally(OURS)) == ("first", 2, 1, "1 undecided")
    assert second.title == "the second study"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"name": "tiny"}', '{"claims": [3]}', "\xff", None])
def test_what_no_study_wrote_is_on_no_page(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "tiny/pocket"
    folder.mkdir(parents=True)
    if content is None:  # a study that was moved
        other = summary_of(collect(grid_of(tmp_path, title="a")))
        content = summary_json(other).replace('"tiny"', '"other"')
    (folder / "summary.json").write_text(content, encoding="latin-1")
    assert summaries_in(tmp_path, "pocket") == []


# ---------------------------------------------------------------------- pictures


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    def savefig(figure: Any, path: Path, **_: Any) -> None:
        made.append(figure)
        path.touch()

    monkeypatch.setattr(Figure, "savefig", savefig)
    return made


def test_legends_have_the_studys_order_whoever_comes_first_in_a_panel(tmp_path: Path, drawn: list[Any]) -> None:
    columns = {"one": TINY["columns"]["iid"], "two": {"metric": "train/loss"}}
    grid = grid_of(tmp_path, columns=columns, skip=["fedavg/one"])
    finish(grid, "prox", "one", 0, "round,global/acc,train/loss\n0,0.5,1\n1,0.6,1\n")
    for row, column in (("fedavg", "two"), ("prox", "two")):
        finish(grid, row, column, 0, "round,global/acc,train/loss\n0,0.5,1\n1,0.6,1\n")
    for draw in (figures.draw_bars, figures.draw_curves):
        draw(collect(grid), tmp_path / "x.png")
    for figure in drawn:
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == ["fedavg", "prox"]


def test_axes_have_the_metrics_name_for_print(tmp_path: Path, drawn: list[Any]) -> None:
    columns = {name: {**TINY["columns"]["iid"], "x": x} for x, name in enumerate(("one", "two"))}
    grid = grid_of(tmp_path, columns=columns, scale=100, y_label="accuracy in %", x_label="skew")
    for row in ("fedavg", "prox"):  # both columns have the same runs
        finish(grid, row, "one", 0, "round,global/acc\n0,0.5\n1,0.6\n")
    for draw in (figures.draw_bars, figures.draw_curves, figures.draw_lines):
        draw(collect(grid), tmp_path / "x.png")
    bars, curves, lines = ([axes.get_ylabel() for axes in figure.axes] for figure in drawn[::2])
    assert (bars, curves, lines) == (["accuracy in %"], ["accuracy in %"] * 2, ["accuracy in %"])


def test_a_legend_is_no_wider_than_its_figure(tmp_path: Path, drawn: list[Any]) -> None:
    names = [f"a method of many words, {number}" for number in range(9)]
    rows = {f"r{i}": {"label": name, "set": {"trainer.max_rounds": 2 + i}} for i, name in enumerate(names)}
    grid = grid_of(tmp_path, rows=rows)
    for number in range(9):
        finish(grid, f"r{number}", "iid", 0, "round,global/acc\n0,0.5\n1,0.6\n")
    for draw in (figures.draw_bars, figures.draw_curves):
        draw(collect(grid), tmp_path / "x.png")
    for figure in drawn:
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == names
        figure.canvas.draw()
        assert figure.bbox.x0 <= legend.get_window_extent().x0
        assert legend.get_window_extent().x1 <= figure.bbox.x1


def test_the_bands_of_curves_are_confidence_intervals_and_do_not_flatten_the_lines(
    tmp_path: Path, drawn: list[Any]
) -> None:
    # Seeds at 0.4 and 0.6 in round 1: mean 0.5, s = 0.1414, s/√2 = 0.1, t(97.5 %, 1) = 12.7062: 0.5 ± 1.27062.
    grid = grid_of(tmp_path, rows={"prox": TINY["rows"]["prox"]}, seeds=[0, 1], band="interval")
    shown(grid, "prox", "iid", 0, 0.4)
    shown(grid, "prox", "iid", 1, 0.6)
    figures.draw_curves(collect(grid), tmp_path / "x.png")
    axes = drawn[0].axes[0]
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices
    last = heights[np.isclose(heights[:, 0], 1)][:, 1]
    assert (last.min(), last.max()) == pytest.approx((0.5 - 1.27062, 0.5 + 1.27062), abs=1e-5)
    low, high = axes.get_ylim()
    assert (low, high) == pytest.approx((0.1 - 0.06 * 0.5, 0.6 + 0.06 * 0.5))  # from 0.1 in round 0 to 0.6, and 6 %


@pytest.mark.parametrize(
    ("along", "metric", "label"),
    [("bytes", "comm/total_bytes", "sent up and down"), ("seconds", "time/round_s", "seconds of the rounds")],
)
def test_curves_over_what_was_spent_have_bands_of_the_standard_error(
    tmp_path: Path, drawn: list[Any], along: str, metric: str, label: str
) -> None:
    """Round 1 is not evaluated. Until the end of rounds 0 and 2: 100 and 600, 200 and 800, means 150 and 700.

    In round 2 the seeds are at 0.4 and 0.6: s = 0.1414, and the standard error s/√2 = 0.1.
    """
    grid = grid_of(tmp_path, rows={"prox": TINY["rows"]["prox"]}, seeds=[0, 1], along=along)
    finish(grid, "prox", "iid", 0, f"round,global/acc,{metric}\n0,0.1,100\n1,,200\n2,0.4,300\n")
    finish(grid, "prox", "iid", 1, f"round,global/acc,{metric}\n0,0.1,200\n1,,200\n2,0.6,400\n")
    figures.draw_curves(collect(grid), tmp_path / "curves.png")
    axes = drawn[0].axes[0]
    assert list(axes.lines[0].get_xdata()) == [150, 700]
    assert label in axes.get_xlabel()
    heights = axes.collections[0].get_paths()[0].vertices
    last = heights[np.isclose(heights[:, 0], 700)][:, 1]
    assert (last.min(), last.max()) == pytest.approx((0.4, 0.6))
    html = report_html(collect(grid), [tmp_path / "curves.png"])
    assert (
        f"Means over seeds, over {along}; the bands are the standard error of the mean, s/√n, on either side." in html
    )


def test_a_run_that_has_not_logged_its_bytes_is_named(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, along="bytes")
    shown(grid, "prox", "iid", 0, 0.4)
    with pytest.raises(CheckpointError, match=r"metrics.csv has no comm/total_bytes; set the study's along to rounds"):
        figures.draw_curves(collect(grid), tmp_path / "x.png")


@pytest.mark.parametrize(
    ("key", "told"), [("along", "rounds or bytes or seconds"), ("band", "standard error or interval")]
)
def test_an_unknown_axis_or_band_is_named(tmp_path: Path, key: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is 'epochs'.*{told}"):
        grid_of(tmp_path, **{key: "epochs"})


def test_the_same_runs_give_the_same_pictures(tmp_path: Path) -> None:
    grid = grid_of(tmp_path)
    shown(grid, "prox", "iid", 0, 0.4)
    found = []
    for _ in range(2):
        figures.draw_bars(collect(grid), tmp_path / "bars.png")
        found.append([(tmp_path / f"bars.{kind}").read_bytes() for kind in ("png", "svg")])
    assert found[0] == found[1]
    assert found[0][1].startswith(b"<?xml")
