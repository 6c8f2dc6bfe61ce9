"""Make each notebook of this folder from its Python file: `python write_notebooks.py` runs all cells and keeps outputs.

A cell begins with ``# %%``, one of text with ``# %% [markdown]``. The title gets a badge that opens the notebook in
Colab; ``# %pip install lit-fed`` becomes a cell that installs lit_fed where it is missing.
"""

import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

os.environ["MPLBACKEND"] = "agg"

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
SOURCE = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]["urls"]["Source"]
COLAB = "https://colab.research.google.com"
# From the repository until the first release: before it, an index may hold anybody's package of this name.
INSTALL = f"""\
from importlib.util import find_spec

if find_spec("lit_fed") is None:
    %pip install --quiet "PACKAGE @ git+{SOURCE}"
"""


def badge(source: Path) -> str:
    """The picture and the link that open a notebook in Colab."""
    place = f"{SOURCE.removeprefix('https://github.com')}/blob/main/examples/notebooks/{source.stem}.ipynb"
    return f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({COLAB}/github{place})"


def cells_of(source: Path) -> list[dict[str, Any]]:
    """The cells of a Python file, without outputs."""
    cells: list[dict[str, Any]] = []
    title, *parts = re.split(r"^# %%", source.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for number, part in enumerate([f"{title.rstrip()}\n#\n# {badge(source)}\n", *parts]):
        head, _, text = part.partition("\n")
        if head.strip() == "[markdown]":
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE).strip()
            cell: dict[str, Any] = {"cell_type": "markdown", "metadata": {}}
        else:
            if install := re.search(r"^# %pip install '?([\w\[\]-]+)", text, re.MULTILINE):
                text = INSTALL.replace("PACKAGE", install[1])
            text = text.strip()
            cell = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
        cells.append({"id": f"cell-{number}", **cell, "source": text.splitlines(keepends=True)})
    return cells


def run(cells: list[dict[str, Any]], folder: Path) -> None:
    """Run the cells of code in order, in a folder, and keep in each what it prints and draws."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(folder):
        for cell in cells:
            code = "".join(cell["source"])
            if cell["cell_type"] == "markdown" or "%pip" in code:
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, cell["id"], "exec"), names)
            if text := printed.getvalue():
                lines = text.splitlines(keepends=True)
                cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": lines})
            for number in plt.get_fignums():
                png = io.BytesIO()
                plt.figure(number).savefig(png, format="png", dpi=72)
                data = {"image/png": base64.b64encode(png.getvalue()).decode()}
                cell["outputs"].append({"output_type": "display_data", "data": data, "metadata": {}})
            plt.close("all")


def write(source: Path) -> None:
    """Write the notebook beside its source."""
    cells = cells_of(source)
    with tempfile.TemporaryDirectory() as folder:
        run(cells, Path(folder))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    text = json.dumps(book, indent=1, ensure_ascii=False)
    source.with_suffix(".ipynb").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for one in [HERE / name for name in sys.argv[1:]] or sorted({*HERE.glob("*.py")} - {Path(__file__).resolve()}):
        write(one)
