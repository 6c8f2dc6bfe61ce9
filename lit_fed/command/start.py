"""Where the program starts: it says so before the imports, which take seconds, and Ctrl-C ends it while they last."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main(args: list[str] | None = None) -> None:
    """Import the command line and run it.

    Args:
        args: Arguments instead of ``sys.argv[1:]``.
    """
    # A handler, because an import that is interrupted may take the exception for a missing package and go on.
    before = signal.signal(signal.SIGINT, _leave)
    told = sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"
    if told:
        print("lit-fed: loading PyTorch and Lightning …", end="", file=sys.stderr, flush=True)
    from lit_fed.command.cli import main as run

    if told:
        print("\r\033[K", end="", file=sys.stderr, flush=True)  # back to the beginning of the line, and clear it
    signal.signal(signal.SIGINT, before)
    run(args)


def _leave(_signum: int, _frame: FrameType | None) -> None:
    """Nothing has begun that would have to be put away."""
    os._exit(130)
