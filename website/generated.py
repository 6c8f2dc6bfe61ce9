"""Files of ``lit_fed/generated/``, which are made from the code: ``python -m website.generated`` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from website.completion import script
from website.schema import schema

FOLDER = Path(__file__).resolve().parents[1] / "lit_fed" / "generated"


def texts() -> dict[str, str]:
    """Texts of the files by their names."""
    scripts = {f"completion.{shell}": f"{script(shell)}\n" for shell in ("bash", "zsh", "tcsh")}
    return {"lit_fed.schema.json": _by_definition(schema()), **scripts}


def _by_definition(made: dict[str, Any]) -> str:
    """A schema with one definition a line, so that a difference names it."""
    lines = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in sorted(made.pop("$defs").items())]
    head = json.dumps(made)[:-1]
    return f'{head}, "$defs": {{\n' + ",\n".join(lines) + "\n}}\n"


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
