"""Tables, claims and reports of runs whose numbers are written by hand."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from lit_fed.studies.file.study import Place
from lit_fed.studies.pages.figures import draw_bars, draw_curves, draw_lines, has_lines
from lit_fed.studies.pages.report import index_html, report_html
from lit_fed.studies.results.results import caption, collect, table_csv, table_markdown
from lit_fed.studies.results.summary import claims_markdown, summary_of, tally_text
from lit_fed.studies.running.display import duration, estimate
from lit_fed.studies.running.jobs import FirstRound
from tests.studies.support import TINY, finish, grid_of


@pytest.fixture
def grid(tmp_path):
    """FedAvg 0.50, 0.60; FedProx 0.70, 0.82 and, of the other column, one seed of two."""
    grid = grid_of(
        tmp_path,
        scale=100,
        decimals=1,
        seeds=[0, 1],
        columns={"iid": {"label": "equal | clients"}, "more": {"set": {"trainer.max_rounds": 3}}},
        skip=["fedavg/more"],
        published={"fedavg": {"iid": 54}, "prox": {"iid": [80, 2]}},
        claims=[{"claim": "prox > fedavg at iid", "says": "It helps"}, "fedavg > 50 at iid", "prox rises at more"],
    )
    for row, column, seed, value in (
        *(("fedavg", "iid", 0, 0.50), ("fedavg", "iid", 1, 0.60)),
        *(("prox", "iid", 0, 0.70), ("prox", "iid", 1, 0.82), ("prox", "more", 0, 0.9)),
    ):
        finish(grid, row, column, seed, f"round,global/acc\n0,0.1\n1,{value}\n")
    return grid


def test_the_table_by_hand(grid):
    # FedAvg: mean 55, s = √((5² + 5²)/1) = 7.07; FedProx: mean 76, s = √(6² + 6²) = 8.49; 55 − 54 = 1, 76 − 80 = −4.
    results = collect(grid)
    entry = results.entries[Place("prox", "iid")]
    assert entry.mean == pytest.approx(76)
    assert entry.std == pytest.approx(72**0.5)
    lines = table_markdown(results).splitlines()
    assert "| | equal \\| clients | more |" in lines
    assert "| fedavg | 55.0 ± 7.1 (paper 54, +1.0) |  |" in lines
    assert "| prox | **76.0 ± 8.5** (paper 80 ± 2, −4.0) | 90.0 (1 of 2 seeds) |" in lines
    assert lines[-1].endswith("it is not of the setting of the profile pocket.")


def test_the_caption_says_where_the_test_set_chose(tmp_path):
    def metric(report, **changes):
        folder = tmp_path / f"{report.replace('/', '_')}_{len(changes)}"
        folder.mkdir()
        grid = grid_of(folder, report=report, **changes)
        finish(grid, "fedavg", "iid", 0, "round,global/acc,val/global/acc\n0,0.5,0.9\n1,0.75,0.8\n")
        return caption(collect(grid))[0]

    assert metric("best") == "Metric: global/acc, best evaluated round on the test set."
    of_test = "Metric: global/acc, in the best evaluated round of global/acc on the test set."
    assert metric("best of global/acc") == of_test
    assert metric("best of val/global/acc") == "Metric: global/acc, in the best evaluated round of val/global/acc."
    assert metric("last") == "Metric: global/acc, last round."
    named = metric("last", y_label="accuracy in %", scale=100)
    assert named == "Metric: accuracy in %, which is global/acc, last round, times 100."
    on = {"set": TINY["set"] | {"trainer.evaluate_on": "val"}}
    assert metric("best", **on) == "Metric: global/acc, best evaluated round."


def test_the_table_as_csv(grid):
    rows = list(csv.DictReader(io.StringIO(table_csv(collect(grid)))))
    assert [(row["row"], row["column"], row["seeds"], row["best"]) for row in rows] == [
        ("fedavg", "iid", "2", "no"),
        ("prox", "iid", "2", "yes"),
        ("prox", "more", "1", "no"),
    ]
    assert (float(rows[0]["mean"]), float(rows[0]["published"]), float(rows[0]["difference"])) == (55, 54, 1)
    assert rows[2]["std"] == ""


def test_the_claims_by_hand(grid):
    # Paired differences 20 and 22: 21 ± 12.706·1.414/√2 = 12.7; 0 and 10 are 5 ± 63.5; one seed decides nothing. The
    # first has t = 21 and P = 1 − 2·arctan(21)/π = 0.0303, above Holm's 0.05/2: the third has no p-value.
    verdicts = [(verdict.outcome, verdict.seeds) for _, verdict in collect(grid).verdicts]
    assert verdicts == [("holds", 2), ("undecided", 2), ("undecided", 1)]
    text = claims_markdown([summary_of(collect(grid))])
    assert "| tiny | It helps (`prox > fedavg at iid`) | holds | +21 ± 13, not by Holm | 2 |" in text
    assert "| `fedavg > 50 at iid` | undecided | +55 ± 64 (to exceed 50), within the spread | 2 |" in text


def test_a_difference_of_zero_is_printed_as_zero_beside_the_number_that_it_must_exceed(tmp_path):
    grid = grid_of(
        tmp_path, seeds=[0, 1], scale=100, claims=["-2 < prox - fedavg < 2 at iid", "prox > fedavg + 0.5 at iid"]
    )
    for row in ("fedavg", "prox"):
        for seed, value in ((0, 0.53), (1, 0.61)):
            finish(grid, row, "iid", seed, f"round,global/acc\n0,{value}\n")
    text = claims_markdown([summary_of(collect(grid))])
    # Both of two equal differences exceed −2 by 2, without a spread; 0 falls short of 0.5 by 0.5.
    assert "| holds | +0 ± 0 (to exceed −2), at worst " in text
    assert "| fails | +0 ± 0 (to exceed 0.5) | 2 |" in text


def test_lower_is_better_for_a_loss(tmp_path):
    grid = grid_of(tmp_path, metric="train/loss")
    finish(grid, "fedavg", "iid", 0, "round,train/loss\n1,0.5\n")
    finish(grid, "prox", "iid", 0, "round,train/loss\n1,0.4\n")
    assert [entry.best for entry in collect(grid).entries.values()] == [False, True]


def test_logarithms_have_the_mean_and_decide_the_claim(tmp_path):
    # FedAvg −3, −1: mean −2, s = √(1² + 1²) = 1.41; FedProx −5, −3: paired differences of 2 and 2, 2 ± 0.
    # Of the values themselves the mean is that of the largest: (0.001 + 0.1)/2 = 0.05, −1.3.
    claims = ["prox < fedavg at iid", "fedavg - prox > 1 at iid"]
    grid = grid_of(tmp_path, metric="train/loss", scale="log10", decimals=1, seeds=[0, 1], claims=claims)
    for row, values in {"fedavg": ("0.001", "0.1"), "prox": ("0.00001", "0.001")}.items():
        for seed, value in enumerate(values):
            finish(grid, row, "iid", seed, f"round,train/loss\n1,{value}\n")
    results = collect(grid)
    assert results.entries[Place("fedavg", "iid")].mean == pytest.approx(-2)
    assert results.entries[Place("fedavg", "iid")].std == pytest.approx(2**0.5)
    assert [verdict.outcome for _, verdict in results.verdicts] == ["holds", "holds"]
    assert grid.curve(("prox", "iid"), 0) == [(1, pytest.approx(-5))]
    assert "Metric: log10 of train/loss, last round." in table_markdown(results)


def test_who_looks_equal_is_equally_best(tmp_path):
    grid = grid_of(tmp_path, decimals=2)
    finish(grid, "fedavg", "iid", 0, "round,global/acc\n1,0.501\n")
    finish(grid, "prox", "iid", 0, "round,global/acc\n1,0.502\n")
    assert [entry.best for entry in collect(grid).entries.values()] == [True, True]


@pytest.mark.parametrize(("other", "bold"), [((0.40, 0.44), True), ((0.26, 0.20), False)])
def test_what_the_best_does_not_beat_is_bold_too(other: tuple[float, float], bold: bool, tmp_path) -> None:
    """Differences (.06, −.04): s = .0707, t(.95; 1) = 6.31, .01 ± .32, not beaten; (.2, .2): .2 ± 0, beaten."""
    grid = grid_of(tmp_path, seeds=[0, 1])
    for seed, (one, two) in enumerate(zip((0.46, 0.40), other, strict=True)):
        finish(grid, "fedavg", "iid", seed, f"round,global/acc\n1,{one}\n")
        finish(grid, "prox", "iid", seed, f"round,global/acc\n1,{two}\n")
    assert [entry.best for entry in collect(grid).entries.values()] == [True, bold]


def test_the_report_needs_nothing_else(grid, tmp_path):
    results = collect(grid)
    pictures = [tmp_path / "bars.png", tmp_path / "curves.png"]
    draw_bars(results, pictures[0])
    draw_curves(results, pictures[1])
    grid.cells[-1].write_record(status="failed", error="it <broke>")
    html = report_html(results, pictures)
    assert html.count("data:image/png;base64,") == 2
    assert "http" not in html.replace("https://github.com", ""), "it reaches for the network"
    assert "it &lt;broke&gt;" in html
    assert "equal | clients" in html
    for cell in grid.cells:
        assert cell.shell in html
    for path in TINY["configs"]:
        assert path in html
    again = tmp_path / "again.png"
    draw_bars(results, again)
    assert again.read_bytes() == pictures[0].read_bytes()


def test_a_page_leads_to_the_reports_and_counts_the_claims(grid):
    # The claims above: one holds, none is equal, two are undecided; of six runs five are finished.
    ours = summary_of(collect(grid))
    several = [ours, replace(ours, source="Somebody, 2026, Table 1")]
    html = index_html(several, "pocket")
    assert '<a href="tiny/pocket/report.html">tiny</a>' in html
    assert "5 of 6</td><td></td><td>1 holds, 2 undecided</td></tr>" in html, "without a source no paper says it"
    assert "5 of 6</td><td>1 holds, 2 undecided</td><td></td></tr>" in html
    assert html.count('<td>tiny</td><td>It helps<br><code>prox &gt; fedavg at iid</code></td><td class="holds">') == 2
    undecided = "3 claims of {}: 1 holds, 2 undecided"
    assert tally_text(several) == f"2 studies: {undecided.format('papers')}; {undecided.format('ours')}"
    assert tally_text([replace(ours, claims=())]) == "1 study: no claims"


def test_claims_of_a_paper_and_of_ours_stand_apart(tmp_path):
    """A wording that continues one of ours is ours, too."""
    says = ["It helps", "Why (ours)", "… and where", "It harms"]
    claims = [{"says": words, "claim": f"prox > {place} at iid"} for place, words in enumerate(says)]
    grid = grid_of(tmp_path, source="Somebody, 2026, Table 1", claims=claims)
    finish(grid, "prox", "iid", 0, "round,global/acc\n0,0.1\n")
    results = collect(grid)
    for text in (claims_markdown([summary_of(results)]), report_html(results, []).partition("<h2>Made with")[0]):
        words = ["What the paper says", "It helps", "It harms", "Claims of ours", "Why (ours)", "… and where"]
        assert [text.count(word) for word in words] == [1] * 6
        assert sorted(map(text.index, words)) == list(map(text.index, words))


def test_metrics_have_names_for_print(tmp_path, monkeypatch):
    labels = {"global/acc": "accuracy", "val/global/acc": "accuracy on validation data", "train/loss": "loss"}
    claims = [{"claim": "prox < fedavg", "metric": "train/loss"}, "prox > fedavg"]
    grid = grid_of(tmp_path, report="best of val/global/acc", metric_labels=labels, claims=claims)
    for row in ("fedavg", "prox"):
        finish(grid, row, "iid", 0, "round,global/acc,val/global/acc,train/loss\n0,0.5,0.9,2\n")
    results = collect(grid)
    told = "Metric: accuracy, which is global/acc, in the best evaluated round of accuracy on validation data."
    assert caption(results)[0] == told
    assert [claim.text for claim in summary_of(results).claims] == ["prox < fedavg, loss", "prox > fedavg"]
    drawn: list[str] = []
    monkeypatch.setattr("matplotlib.axes.Axes.set_ylabel", lambda axes, text, **kwargs: drawn.append(text))
    draw_bars(results, tmp_path / "bars.png")
    draw_curves(results, tmp_path / "curves.png")
    assert drawn == ["accuracy", "accuracy"]


def test_time_to_a_target_by_hand(tmp_path, monkeypatch):
    """Seconds until 0.7: 4 and 6, mean 5, s = √2; FedProx is never there in one of two seeds.

    Drawn are steps: at 3, 4, 5 and 6 s seed 0 has .5, .75, .75, .75 and seed 1 has .25, .25, .5, .7; common to both is
    from 3 to 6 s.
    """
    goal = {"metric": "clock/virtual_s", "report": "first global/acc at 0.7", "better": "lower", "scale": 1}
    grid = grid_of(tmp_path, seeds=[0, 1], published={}, claims=["prox > fedavg at iid"], **goal)
    head = "round,global/acc,clock/virtual_s\n"
    for row, seed, text in (
        ("fedavg", 0, "0,0.5,2\n1,,3\n2,0.75,4\n3,0.75,6\n"),
        ("fedavg", 1, "0,0.25,3\n1,0.5,5\n2,0.7,6\n3,0.7,7\n"),
        ("prox", 0, "0,0.75,9\n"),
        ("prox", 1, "0,0.5,9\n"),
    ):
        finish(grid, row, "iid", seed, head + text)
    results = collect(grid)
    table = table_markdown(results)
    assert "| fedavg | 5.0000 ± 1.4142 |" in table
    assert "| prox | not in 1 of 2 |" in table
    assert "clock/virtual_s, in the first evaluated round with global/acc at 0.7 on the test set" in table
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda axes, *args, **kwargs: drawn.append(args))
    draw_curves(results, tmp_path / "curves.png")
    monkeypatch.undo()
    (points, mean), _ = drawn
    assert (points, mean.tolist()) == ([3.0, 4.0, 5.0, 6.0], [0.375, 0.5, 0.625, 0.725])
    for draw in (draw_bars, draw_curves):
        draw(results, tmp_path / f"{draw.__name__}.png")


def test_pictures_of_nothing_finished(tmp_path):
    results = collect(grid_of(tmp_path))
    draw_bars(results, tmp_path / "bars.png")
    draw_curves(results, tmp_path / "curves.png")
    assert "| fedavg | – |" in table_markdown(results)


def test_the_time_is_estimated_from_the_row_or_from_a_round(grid):
    # Finished cells of FedProx took 10 s for 2, 2 and 3 rounds: (5 + 5 + 3.33)/3 = 4.44 s a round, for 3 rounds.
    left = [cell for cell in grid.cells if not cell.done and cell.row == "prox"]
    finished = [cell for cell in grid.cells if cell.done and cell.row == "prox"]
    assert [cell.name for cell in left] == ["prox/more/1"]
    assert estimate(left, finished, None) == pytest.approx(3 * (5 + 5 + 10 / 3) / 3)
    # 4 s of start, 3 rounds of 2 s, and tests of 10 s after every second round and the last.
    left[0].config["trainer"]["evaluate_every"] = 2
    assert estimate(left, [], FirstRound([], training_s=2, evaluation_s=10, rest_s=4)) == 4 + 3 * 2 + 2 * 10
    left[0].config["trainer"]["evaluate_every"] = 0
    assert estimate(left, [], FirstRound([], training_s=2, evaluation_s=0, rest_s=4)) == 4 + 3 * 2
    assert estimate(left, [], None) is None
    assert [duration(s) for s in (40, 200, 5 * 3600, 90000, 86400 * 5)] == ["40 s", "3 min", "5.0 h", "25 h", "5 days"]


def _remembering(figures: list[Figure]) -> Callable[..., None]:
    """`Figure.savefig`, which also keeps the figure."""
    save = Figure.savefig

    def savefig(figure: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(figure)
        save(figure, *args, **kwargs)

    return savefig


def test_lines_stand_where_their_columns_do_and_the_papers_are_dashed(tmp_path, monkeypatch):
    columns = {"b": {"x": 10, "metric": "global/pck_10x8"}, "a": {"x": 5, "metric": "global/pck_5x4"}}
    changes = {"seeds": [0, 1], "columns": columns, "x_label": "height", "published": {"prox": {"a": 3, "b": 7}}}
    grid = grid_of(tmp_path, metric="", **changes)
    for seed in (0, 1):
        for row in ("fedavg", "prox"):
            metrics = f"round,global/pck_5x4,global/pck_10x8\n0,{1 + seed},{4 + seed}\n"
            finish(grid, row, "b", seed, metrics)
    figures = []
    monkeypatch.setattr(Figure, "savefig", _remembering(figures))
    assert has_lines(grid.study)
    draw_lines(collect(grid), tmp_path / "lines.png")
    axes = figures[0].axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("height", "global/pck")
    drawn = [(line.get_linestyle(), line.get_xydata().tolist()) for line in axes.lines if line.get_marker() in "o_"]
    # Means of 1 and 2 at 5, and of 4 and 5 at 10, of both rows; the paper's values beside the second.
    ours = ("-", [[5.0, 1.5], [10.0, 4.5]])
    assert [line for line in drawn if len(line[1]) == 2 and line[0] in ("-", "--")] == [
        ours,
        ours,
        ("--", [[5.0, 3.0], [10.0, 7.0]]),
    ]


def test_rows_on_an_axis_make_a_line_of_every_column(tmp_path, monkeypatch):
    rows = {name: {**TINY["rows"][name], "x": x} for name, x in (("fedavg", 0), ("prox", 1))}
    grid = grid_of(tmp_path, rows=rows)
    for row, value in (("fedavg", 0.25), ("prox", 0.75)):
        finish(grid, row, "iid", 0, f"round,global/acc\n0,{value}\n")
    figures = []
    monkeypatch.setattr(Figure, "savefig", _remembering(figures))
    draw_lines(collect(grid), tmp_path / "lines.png")
    assert [line.get_xydata().tolist() for line in figures[0].axes[0].lines if line.get_marker() == "o"] == [
        [[0.0, 0.25], [1.0, 0.75]]
    ]
    assert not has_lines(grid_of(tmp_path).study)


def test_the_report_shows_what_the_first_seeds_runs_drew(tmp_path):
    grid = grid_of(tmp_path, seeds=[0, 1], pictures=["poses", "absent"])
    for row in ("fedavg", "prox"):
        for seed in (0, 1):
            finish(grid, row, "iid", seed, "round,global/acc\n0,0.5\n")
    run = next(cell for cell in grid.cells if (cell.row, cell.seed) == ("prox", 0)).run
    with SummaryWriter(str(run)) as writer:
        for step, shade in enumerate((10, 20)):  # the last counts
            writer.add_image("pictures/poses", np.full((4, 5, 3), shade, np.uint8), step, dataformats="HWC")
        writer.add_image("pictures/partition", np.zeros((2, 2, 3), np.uint8), 0, dataformats="HWC")
    report = report_html(collect(grid), [])
    part = report.partition("<h2>Pictures of the runs</h2>")[2].partition("<h2>")[0]
    assert part.count("<img") == 1
    assert "prox/iid/0" in part
    assert "No run drew <code>absent</code>: runs from before" in part
    png = base64.b64decode(part.partition("base64,")[2].partition('"')[0])
    assert np.asarray(Image.open(io.BytesIO(png))).tolist() == [[[20] * 3] * 5] * 4
    assert "Pictures of the runs" not in report_html(collect(grid_of(tmp_path, seeds=[0, 1])), [])
