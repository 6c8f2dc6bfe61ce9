"""A study as one HTML file that needs nothing else: table, claims, pictures, commands, configurations, machine."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from lit_fed.studies.cells import Cell, Grid
from lit_fed.studies.claims import HOW_DECIDED, OUTCOMES
from lit_fed.studies.results import Entry, Results, caption, count_verdicts, tally_text, verdict_text
from lit_fed.studies.run_pictures import pictures_of
from lit_fed.studies.study import Place

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; max-width: 68rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; line-height: 1.25 } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; margin: .6rem 0 } .wide { overflow-x: auto }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
thead th { border-bottom: 2px solid #888 } td.number { text-align: right; white-space: nowrap }
small, .quiet { color: #5f5f5f } img { max-width: 100% } code, pre { font: 13px/1.4 ui-monospace, monospace }
pre { background: #f6f6f6; padding: .7rem; overflow-x: auto } summary { cursor: pointer; padding: .15rem 0 }
.holds { color: #12692f; font-weight: 600 } .fails { color: #a8101f; font-weight: 600 }
.equal { color: #0b5394; font-weight: 600 }
.undecided { color: #6b5500 }
"""


def report_html(results: Results, pictures: Iterable[Path], failures: Sequence[tuple[Cell, str]]) -> str:
    """The report.

    Args:
        results: The study's table and claims.
        pictures: PNG files to inline.
        failures: Cells that failed, and why.
    """
    grid, study = results.grid, results.grid.study
    done = [cell for cell in grid.cells if cell.done]
    parts = [
        f"<h1>{escape(study.title)}</h1>",
        f"<p>{escape(study.about)}</p>" if study.about else "",
        f"<p class=quiet>{escape(study.name)}, profile {escape(study.profile)}"
        + (f" · source: {escape(study.source)}" if study.source else "")
        + f" · {len(done)} of {len(grid.cells)} cells finished</p>",
        _table(results),
        f"<p><small>{escape(' '.join(caption(results)))}</small></p>",
        _claims(results),
        _failures(failures),
        "<h2>Pictures</h2>",
        *(_picture(path.read_bytes(), path.stem) for path in pictures),
        _pictures_of_runs(grid),
        _made_with(done),
        _cells(grid),
        _files(grid),
    ]
    return _page(study.title, "\n".join(part for part in parts if part))


def _table(results: Results) -> str:
    study = results.grid.study
    head = "".join(f"<th>{escape(column.label)}</th>" for column in study.columns.values())
    rows = []
    for row, variant in study.rows.items():
        cells = "".join(_entry(results.entries[Place(row, column)]) for column in study.columns)
        rows.append(f"<tr><th>{escape(variant.label)}</th>{cells}</tr>")
    return f"<div class=wide><table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def _entry(entry: Entry) -> str:
    ours = f"<b>{escape(entry.ours)}</b>" if entry.best else escape(entry.ours)
    return f"<td class=number>{ours}" + (f"<br><small>{escape(entry.paper)}</small>" if entry.paper else "") + "</td>"


def _claims(results: Results) -> str:
    if not results.verdicts:
        return ""
    return f"<h2>What the paper says</h2>{_claims_table([results])}"


def _claims_table(several: Sequence[Results]) -> str:
    """The claims of one study, or of several with a column that names it."""
    name = len(several) > 1
    rows = "".join(
        "<tr>" + (f"<td>{escape(results.grid.study.name)}</td>" if name else "") + f"<td>{escape(claim.says)}"
        f"{'<br>' if claim.says else ''}<code>{escape(claim.text)}</code></td>"
        f"<td class={verdict.outcome}>{verdict.outcome}</td>"
        f"<td class=number>{escape(verdict_text(verdict))}</td><td class=number>{verdict.seeds}</td></tr>"
        for results in several
        for claim, verdict in results.verdicts
    )
    head = "<th>study</th>" * name + "<th>claim</th><th>verdict</th><th>margin</th><th>seeds</th>"
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table><p><small>{escape(HOW_DECIDED)}</small></p>"
    )


def index_html(several: Sequence[Results], folder: Path) -> str:
    """A page that leads to the reports of studies and has all of their claims.

    Args:
        several: The studies.
        folder: Where the page will lie.
    """
    rows = []
    for results in several:
        grid, tally = results.grid, count_verdicts([results])
        done = sum(cell.done for cell in grid.cells)
        link = quote((grid.folder / "report.html").relative_to(folder).as_posix())
        counts = "".join(f"<td class=number>{tally[outcome]}</td>" for outcome in OUTCOMES)
        rows.append(
            f"<tr><td><a href='{link}'>{escape(grid.study.name)}</a></td><td>{escape(grid.study.title)}<br><small>"
            f"{escape(grid.study.source)}</small></td><td class=number>{done} of {len(grid.cells)}</td>{counts}</tr>"
        )
    title = f"Studies, profile {several[0].grid.study.profile}"
    heads = ("study", "", "cells finished", *OUTCOMES)
    body = (
        f"<h1>{escape(title)}</h1>\n<p>{escape(tally_text(several))}</p>\n<table><thead><tr>"
        + "".join(f"<th>{word}</th>" for word in heads)
        + f"</tr></thead><tbody>{''.join(rows)}</tbody></table>\n<h2>All claims</h2>\n{_claims_table(several)}"
    )
    return _page(title, body)


def _page(title: str, body: str) -> str:
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{escape(title)}</title>"
    return (
        f"<!doctype html>\n<html lang=en><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _failures(failures: Sequence[tuple[Cell, str]]) -> str:
    if not failures:
        return ""
    rows = "".join(f"<li><code>{escape(cell.name)}</code>: {escape(reason)}</li>" for cell, reason in failures)
    return f"<h2>Cells that failed</h2><ul>{rows}</ul>"


def _picture(png: bytes, name: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f"<p><img alt='{escape(name)}' src='data:image/png;base64,{data}'></p>"


def _pictures_of_runs(grid: Grid) -> str:
    """What the first seed's runs drew of what the study asks for, name by name."""
    study, parts = grid.study, []
    first = [cell for cell in grid.cells if cell.seed == study.seeds[0] and cell.done]
    drawn = [(cell, pictures_of(cell)) for cell in first] if study.pictures else []
    for name in study.pictures:
        for cell, pictures in drawn:
            if name in pictures:
                title = f"{escape(study.rows[cell.row].label)}, <code>{escape(name)}</code>"
                parts.append(f"<h3>{title} <small class=quiet>{escape(cell.name)}</small></h3>")
                parts.append(_picture(pictures[name], f"{name} of {cell.name}"))
    return "<h2>Pictures of the runs</h2>\n" + "\n".join(parts) if parts else ""


def _made_with(done: Sequence[Cell]) -> str:
    """Versions, commit and hardware; several lines where cells were run with different ones."""
    found: dict[str, dict[str, int]] = {}
    for cell in done:
        for key, value in cell.record().get("made_with", {}).items():
            counts = found.setdefault(key, {})
            counts[value] = counts.get(value, 0) + 1
    seconds = sum(cell.record().get("seconds", 0.0) for cell in done)
    rows = []
    for key, counts in found.items():
        several = len(counts) > 1
        values = (f"{value} ({count} cells)" if several else value for value, count in counts.items())
        rows.append(f"<tr><th>{escape(key)}</th><td>{'<br>'.join(map(escape, values))}</td></tr>")
    rows.append(f"<tr><th>time</th><td>{seconds / 60:.1f} minutes in all, one cell after the other</td></tr>")
    return f"<h2>Made with</h2><table><tbody>{''.join(rows)}</tbody></table>"


def _cells(grid: Grid) -> str:
    items = []
    for cell in grid.cells:
        record = cell.record()
        status = "finished" if cell.done else "not finished"
        spent = f", {record['seconds']:.0f} s" if cell.done and "seconds" in record else ""
        where = cell.run if cell.run is not None else cell.folder
        items.append(
            f"<details><summary><code>{escape(cell.name)}</code> <span class=quiet>{status}{spent}</span></summary>"
            f"<pre>{escape(cell.shell)}</pre><p class=quiet>{escape(str(where))}</p></details>"
        )
    return "<h2>Cells</h2><p>Each is an ordinary run; its command reproduces it.</p>" + "\n".join(items)


def _files(grid: Grid) -> str:
    """The study file and every configuration file that a cell names, and the first cell's resolved configuration."""
    named = [
        word for cell in grid.cells for before, word in zip(cell.args, cell.args[1:], strict=False) if before == "-c"
    ]
    items = []
    for path in dict.fromkeys([str(grid.study.path), *named]):
        text = Path(path).read_text(encoding="utf-8")
        items.append(f"<details><summary><code>{escape(path)}</code></summary><pre>{escape(text)}</pre></details>")
    first = grid.cells[0]
    resolved = json.dumps(first.config, indent=1, default=str)
    items.append(
        f"<details><summary>all settings of <code>{escape(first.name)}</code></summary>"
        f"<pre>{escape(resolved)}</pre></details>"
    )
    return "<h2>Configurations</h2>" + "\n".join(items)
