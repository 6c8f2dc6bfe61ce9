"""Command line: ``lit-fed COMMAND …``, the same as ``python -m lit_fed COMMAND …``, with the commands of the table.

Nothing of this module imports PyTorch, which takes seconds, before a command needs it.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentError

from lit_fed.command.command import Call
from lit_fed.command.endings import JUDGED, Terminated, ending_by_signal, is_first
from lit_fed.command.parsers import make_parsers
from lit_fed.command.refusals.spelling import no_command
from lit_fed.command.table import COMMANDS
from lit_fed.errors import ConfigError, LitFedError, brief, causes, errors_name_options, reason

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # errors of writing that do not name the file


def main(args: list[str] | None = None) -> None:
    """Run the command line.

    A user's mistake ends in one line on stderr and exit status 2, a failed run in exit status 1.

    Args:
        args: Arguments instead of ``sys.argv[1:]``.
    """
    words = sys.argv[1:] if args is None else list(args)
    if os.getcwd() not in sys.path and not any(word in COMMANDS and COMMANDS[word].admits for word in words[:1]):
        sys.path.append(os.getcwd())  # the installed script too finds a user's classes in the working directory
    try:
        with errors_name_options(), ending_by_signal():
            check_text(words)
            status = _run(words)
    except Exception as error:
        line = user_error(error)
        if line is None:
            raise
        ours = next((cause for cause in causes(error) if isinstance(cause, LitFedError)), LitFedError())
        if is_first():
            details = f"{ours.details}\n" if ours.details else ""  # the traceback of the user's own code
            print(f"{details}lit-fed: error: {line}", file=sys.stderr)
        sys.exit(ours.status)
    except Terminated as stop:
        if JUDGED in os.environ or not any(word in COMMANDS and COMMANDS[word].serves for word in words[:1]):
            sys.exit(128 + stop.args[0])
    except KeyboardInterrupt:
        sys.exit(130)
    else:
        if status:
            sys.exit(status)


def needs_pytorch(words: Sequence[str]) -> bool:
    """Whether the command of a command line needs PyTorch and Lightning."""
    line = COMMANDS.get(words[0]) if words else None
    return line is not None and (not line.light or "\0" in "".join(words))  # NUL is refused with the settings' values


def _run(words: list[str]) -> int:
    """Run a command line; return its exit status."""
    if not needs_pytorch(words):
        whole, parsers = make_parsers(words, words[:1].__contains__)
        if words[:1] in (["--help"], ["-h"], ["--version"]):
            whole.parse_args(words[:1])  # prints, and exits
        if not words or words[0] not in parsers:
            raise ConfigError(no_command(words))
        parser = parsers[words[0]]
        try:
            settings = parser.parse_args(words[1:])
        except ArgumentError as error:
            from lit_fed.command.refusals.explain import explain_words

            raise ConfigError(explain_words(error, parser, words[1:], words[0])) from error
        return COMMANDS[words[0]].run(Call(settings, parser, words))
    from lit_fed.command.federated_cli import FederatedCLI

    for name in ("lightning.fabric", "lightning.pytorch"):  # their lines on how processes find each other are noise
        logging.getLogger(name).setLevel(logging.WARNING)
    return FederatedCLI(words).status


def check_text(words: Sequence[str]) -> None:
    """Refuse words that UTF-8 cannot encode, such as a file name from a system with another encoding."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{word!a} is not text in UTF-8; rename the file") from error


def user_error(error: BaseException) -> str | None:
    """One line about a mistake that a user can correct; None for an error that needs its traceback."""
    for cause in causes(error):
        if isinstance(cause, LitFedError):
            return str(cause)
    if isinstance(error, ArgumentError):
        from lit_fed.command.refusals.explain import words_of

        return brief(words_of(error))
    for cause in causes(error):
        if isinstance(cause, MemoryError) or (isinstance(cause, RuntimeError) and "allocate memory" in str(cause)):
            return reason(cause)
        if isinstance(cause, OSError) and cause.strerror and (cause.filename or cause.errno in _FULL):
            return f"{cause.filename}: {cause.strerror}" if cause.filename else cause.strerror
    return None
