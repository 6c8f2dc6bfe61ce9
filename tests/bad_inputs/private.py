"""Cases of private runs: settings out of range, methods that cannot be private, and keys that are none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.bad_inputs.judge import Case
from tests.bad_inputs.options import fit
from tests.support import ROOT

_PRIVATE = ("-c", str(ROOT / "configs" / "privacy" / "client_level.yaml"))
_NO_RANGE = {
    "epsilon": ("0", "-1", "-0.5", ".nan", ".inf", "x"),
    "delta": ("0", "1", "-0.1", "1.5", ".nan", "null"),
    "clip_norm": ("0", "-1", ".nan", ".inf", "null"),
    "noise_multiplier": ("1", "0", "-1", ".nan"),  # beside the file's epsilon
    "withhold": ("2", "x"),
}
_REFUSED = (
    "--algorithm=FedNova", "--algorithm=FedExP", "--algorithm=LocalOnly", "--algorithm.weighting=samples",
    "--trainer.participation=WeightedParticipation", "--trainer.protocols=[CalibratedTest]",
)  # fmt: skip
_KEY = '{"key": "' + "5a" * 32 + '"}\n'
_KEYS: dict[str, tuple[str | bytes, int]] = {
    "others can read": (_KEY, 0o644),
    "that was used before": (_KEY + "0 " + "ab" * 16 + "\n", 0o600),
    "that is empty": ("", 0o600),
    "that is cut off": (_KEY[:40], 0o600),
    "of other bytes": (b"\xff\xfe\x00", 0o600),
    "with a damaged record": (_KEY + "0 xyz\n", 0o600),
}


def private_runs(draw: random.Random) -> Iterator[Case]:
    """Private runs that cannot be: one thing is wrong with each."""
    while True:
        name = draw.choice([*_NO_RANGE])
        value = draw.choice(_NO_RANGE[name])
        yield Case(f"privacy.{name}={value}", fit(*_PRIVATE, f"--trainer.privacy.{name}={value}"))
        option = draw.choice(_REFUSED)
        yield Case(f"privacy around {option}", fit(*_PRIVATE, option))
        kind = draw.choice([*_KEYS])
        yield Case(f"a key {kind}", fit(*_PRIVATE, "--trainer.privacy.key_file=run.key"), _written(*_KEYS[kind]))
        folder = draw.choice(["run.key/below", "."])
        yield Case(f"a key at {folder}", fit(*_PRIVATE, f"--trainer.privacy.key_file={folder}"), _written(_KEY, 0o600))


def _written(content: str | bytes, mode: int) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        path = folder / "run.key"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(mode)

    return write
