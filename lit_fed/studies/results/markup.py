"""A study's table in Markdown and in LaTeX."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from lit_fed.studies.file.study import Place
from lit_fed.studies.results.results import Entry, Results, caption


def head(words: Sequence[object]) -> list[str]:
    """Return the first two lines of a table."""
    return [line(words), "|---" * len(words) + "|"]


def line(words: Sequence[object]) -> str:
    """Return a line of a table, with bars in words escaped."""
    return "| " + " | ".join(str(word).replace("|", "\\|") for word in words) + " |"


_CHARACTERS = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"},
    **{"±": r"$\pm$", "−": "$-$", "×": r"$\times$", "·": r"$\cdot$", "–": "--", "—": "---", "…": r"\ldots{}"},
    **{"≤": r"$\leq$", "≥": r"$\geq$", "≠": r"$\neq$", "≈": r"$\approx$", "→": r"$\to$", "∞": r"$\infty$"},
    **{"²": "$^2$", "³": "$^3$", "°": r"$^\circ$", "‖": r"$\|$"},
}
_LATIN = {"alpha": "A", "beta": "B", "epsilon": "E", "zeta": "Z", "eta": "H", "iota": "I", "kappa": "K", "mu": "M"}
_LATIN |= {"nu": "N", "omicron": "O", "rho": "P", "tau": "T", "chi": "X"}
_SMALL = {"omicron": "o", "lamda": r"$\lambda$", "final sigma": r"$\varsigma$"}
_GREEK = "GREEK SMALL LETTER ", "GREEK CAPITAL LETTER "


def table_latex(results: Results) -> str:
    """Return the table for the package booktabs, the best in bold, the paper's values in brackets."""
    study = results.grid.study
    heads = "".join(f" & {escaped(column.label)}" for column in study.columns.values())
    lines = [f"% {study.called}: {' '.join(study.title.split())}", f"\\begin{{tabular}}{{l{'r' * len(study.columns)}}}"]
    lines += ["\\toprule", f"{heads} \\\\".lstrip(), "\\midrule"]
    for row, variant in study.rows.items():
        cells = "".join(f" & {_cell(results.entries[Place(row, column)])}" for column in study.columns)
        lines.append(f"{escaped(variant.label)}{cells} \\\\")
    lines += ["\\bottomrule", "\\end{tabular}", *(f"% {line}" for line in caption(results))]
    return "\n".join(lines) + "\n"


def _cell(entry: Entry) -> str:
    ours = escaped(entry.ours)
    ours = f"\\textbf{{{ours}}}" if entry.best else ours
    if entry.published is None:
        return ours
    mean, std = entry.published
    return f"{ours} ({mean:g}" + (f" $\\pm$ {std:g}" if std is not None else "") + ")"


def escaped(text: str) -> str:
    """Escape a text for LaTeX; Greek letters and some symbols become mathematics."""
    return "".join(_CHARACTERS.get(character) or _letter(character) for character in text)


def _letter(character: str) -> str:
    name = unicodedata.name(character, "")
    small, capital = (name.removeprefix(prefix).lower() if name.startswith(prefix) else "" for prefix in _GREEK)
    if small in _SMALL:
        return _SMALL[small]
    if " " in small + capital:  # with an accent
        return character
    if small:
        return f"$\\{small}$"
    if capital:
        return _LATIN.get(capital) or ("$\\Lambda$" if capital == "lamda" else f"$\\{capital.capitalize()}$")
    return character
