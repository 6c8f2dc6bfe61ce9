"""Start of the program: a notice during the imports, which take seconds, and Ctrl-C that ends them."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from types import FrameType

from lit_fed.printing import open_standard, unfailing


def main(args: list[str] | None = None) -> None:
    """Run the command line; output that cannot be written is reported at the end.

    Args:
        args: Arguments instead of ``sys.argv[1:]``.
    """
    open_standard()
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries that torch loads crash there
        print("lit-fed: error: the working directory has been deleted; change to another", file=sys.stderr)
        sys.exit(2)
    if args is None:
        _in_utf8()
    with unfailing() as lost:
        try:
            _run(args)
        except SystemExit as stop:
            if stop.code:
                raise
    if lost:
        sys.exit(f"lit-fed: error: standard output could not be written: {lost[0].strerror}")


def _in_utf8() -> None:
    """Restart in Python's UTF-8 mode if file names have another encoding, which TensorBoard does not support.

    Standard output keeps its encoding.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode and sys.executable:
        printed = {} if sys.stdout is None else {"PYTHONIOENCODING": sys.stdout.encoding}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**printed, **os.environ, "PYTHONUTF8": "1"})


def _run(args: list[str] | None) -> None:
    # A handler, because an interrupted import may take the exception for a missing package and go on.
    before = signal.signal(signal.SIGINT, _leave)
    from lit_fed.command.cli import main as run
    from lit_fed.command.cli import needs_pytorch

    if needs_pytorch(sys.argv[1:] if args is None else args):
        says = sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"
        if says:
            print("lit-fed: loading PyTorch and Lightning …", end="", file=sys.stderr, flush=True)
        import_module("lit_fed.command.federated_cli")
        if says:
            print("\r\033[K", end="", file=sys.stderr, flush=True)  # clear the line
    signal.signal(signal.SIGINT, before)
    run(args)


def _leave(_signum: int, _frame: FrameType | None) -> None:
    """Exit at once: there is nothing to clean up yet."""
    os._exit(130)
