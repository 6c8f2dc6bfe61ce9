"""Command line: ``lit-fed COMMAND …``, the same as ``python -m lit_fed COMMAND …``, with the commands of the table."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from jsonargparse import ArgumentError, Namespace
from lightning.fabric.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from lit_fed.checks import check_local
from lit_fed.command.command import Call
from lit_fed.command.endings import exit_reported, witness
from lit_fed.command.reading.config_files import SECTIONS, ConfigFiles
from lit_fed.command.reading.own import add_overwrite
from lit_fed.command.reading.parts import add_parts, build_parts, check_parts_given, set_seed
from lit_fed.command.reading.words import CommandLine
from lit_fed.command.refusals.explain import causes, no_command, words_of
from lit_fed.command.roots import import_named
from lit_fed.command.table import COMMANDS
from lit_fed.errors import ConfigError, LitFedError, brief, errors_name_options, reason
from lit_fed.parsing import Parser
from lit_fed.trainer import FederatedTrainer

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # errors of writing that do not name the file
_OPTIONS_OF_PREDICT = ("client", "output", "overwrite")


class FederatedCLI:
    """The program: it reads a command line, and runs its command.

    Args:
        args: Arguments instead of ``sys.argv[1:]``.
        files: Files that are read already, where several command lines share some.

    Attributes:
        parser: Parser of all commands, which prints help and configurations.
        config: The settings of the command, below its name.
        status: Exit status of a command that is not the trainer's.
        model, datamodule, trainer: Objects of a command of the trainer's.
    """

    status = 0

    def __init__(self, args: list[str] | None = None, files: ConfigFiles | None = None) -> None:
        self._words = sys.argv[1:] if args is None else list(args)
        self._line = CommandLine(self._words, files)
        self._command, known = str(self._line.command), COMMANDS.get(str(self._line.command))
        self._room = known.room_of(self._words) if known is not None else ""
        key = tuple(filter(self._has_options, COMMANDS)), self._room
        if key not in _PARSERS:  # once a process: that takes as long as reading three commands
            _PARSERS[key] = self._make_parsers()
        self.parser, self._parsers = _PARSERS[key]
        try:
            self._read()
            self._run()
        except ConfigError as error:
            error.args = (self._line.settings.located(str(error)),)
            raise

    # ------------------------------------------------------------------ the parser

    def _make_parsers(self) -> tuple[Parser, dict[str, Parser]]:
        """Parser of all commands, and each command's own; only the command that is called gets its options."""
        from lit_fed import __version__

        version = {"version": __version__, "dump_header": [f"lit_fed=={__version__}"]}
        title = "Federated learning for PyTorch Lightning"
        whole = Parser(prog="lit-fed", description=title, exit_on_error=False, **version)
        parsers, actions = dict[str, Parser](), whole.add_subcommands()
        for name, line in COMMANDS.items():
            wanted, description = self._has_options(name), line.help
            if wanted and line.at_home and not line.room_of(self._words):
                description += (
                    f" On a node: --state_dir DIR, whose options are in lit-fed {name} --state_dir DIR --help."
                )
            of_trainer = version if not line.room_of(self._words) else {}
            parsers[name] = made = Parser(description=description, exit_on_error=False, **of_trainer)
            if wanted and line.room_of(self._words):
                line.load(self._words).add_arguments(made)
            elif wanted:
                _add_trainers(made, name)
            actions.add_subcommand(name, made, help=line.help)
        return whole, parsers

    def _has_options(self, name: str) -> bool:
        """Whether a command gets its options: only the one that is called, so that others cost no import."""
        return name == self._command

    def _parser(self, command: str) -> Parser:
        return self._parsers[command]

    def _read(self) -> None:
        """Read settings by the command's own parser; that of all commands prints."""
        if self._words[:1] != [self._command]:
            if self._words[:1] in (["--help"], ["-h"], ["--version"]):
                self.parser.parse_args(self._words[:1])
            raise ConfigError(no_command(self._words))
        self.config = Namespace({"subcommand": self._command})
        self.config[self._command] = settings = self._line.parse(self._parser(self._command))
        if self._line.prints:
            self.parser.parse_args([self._command, *self._line.prints], self.config)
        if not self._room:
            check_parts_given(settings)

    # ------------------------------------------------------------------ running

    def _run(self) -> None:
        settings, parser = self.config[self._command], self._parser(self._command)
        if self._room:
            for key in ("output", "state_dir"):
                check_local(f"--{key}", settings.get(key) or "")
            self.status = COMMANDS[self._command].load(self._words).run(Call(settings, parser, self._words))
            return
        set_seed(settings.trainer)
        parts, rest = build_parts(parser, settings)
        self.model, self.datamodule, self.trainer = parts.model, parts.data, FederatedTrainer(**rest.trainer)
        self.trainer.describe(self.resolved_config(), self._line.given_keys)
        is_fit = self._command == "fit"
        if is_fit and _rank() == 0 and (line := self._line.own_rate):
            print(line)
        with ExitStack() as stack:
            stack.enter_context(exit_reported())
            if _rank() == 0:
                advice = "continue with --ckpt_path last" if is_fit else ""
                self.trainer.local.guard.tell = stack.enter_context(witness(advice))
            own = {key: value for key, value in vars(rest).items() if key not in (*SECTIONS, "config")}
            getattr(self.trainer, self._command)(
                model=parts.model, datamodule=parts.data, algorithm=parts.algorithm, **own
            )

    def resolved_config(self) -> str:
        """The configuration as YAML, without the command's own arguments."""
        run = {key: value for key, value in vars(self.config[self._command]).items() if key in SECTIONS}
        dumped: str = self._parser(self._command).dump(Namespace(**run), skip_unset=False, skip_validation=True)
        return dumped


def _add_trainers(parser: Parser, name: str) -> None:
    """Add the options of a command of the trainer's: a run's, and the arguments of the method."""
    parser.add_argument("-c", "--config", action="config", help="Path to a configuration file in json or yaml format.")
    add_parts(parser)
    skipped = {"model", "datamodule", "algorithm", *(_OPTIONS_OF_PREDICT if name == "predict" else ())}
    parser.add_method_arguments(FederatedTrainer, name, skip=skipped)
    if name == "predict":  # options differ from the arguments: null is a name, a file is written, a flag needs no value
        parser.add_argument(
            "--client",
            type=str,
            help="predict as this client on its own test data: its name, or 0, 1, … where clients have no names",
        )
        parser.add_argument(
            "--output",
            type=str,
            default="predictions.csv",
            help="output file: .csv (a row per sample), .npz (an array per output) or, of poses, .json",
        )
        add_overwrite(parser, "an existing file of predictions")


class Reading(FederatedCLI):
    """A command line that is read and not run."""

    @override
    def _run(self) -> None:
        """Run nothing."""


_PARSERS: dict[tuple[tuple[str, ...], str], tuple[Parser, dict[str, Parser]]] = {}
"""Parsers by the commands whose options they have, and the room."""


def resolve(words: Sequence[str], files: ConfigFiles | None = None) -> str:
    """Read a command line of the trainer without running it.

    Args:
        words: The command line, from the command on.
        files: Files that are read already.

    Returns:
        The resolved configuration as YAML.
    """
    return Reading(list(words), files).resolved_config()


# ---------------------------------------------------------------------- the program


def main(args: list[str] | None = None) -> None:
    """Run the command line.

    A user's mistake ends in one line on stderr and exit status 2, a failed run in exit status 1.

    Args:
        args: Arguments instead of ``sys.argv[1:]``.
    """
    for name in ("lightning.fabric", "lightning.pytorch"):  # their lines on how processes find each other are noise
        logging.getLogger(name).setLevel(logging.WARNING)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the installed script too finds a user's classes in the working directory
    words = sys.argv[1:] if args is None else args
    try:
        with errors_name_options():
            check_text(words)
            import_named()
            status = FederatedCLI(args).status
    except Exception as error:
        line = user_error(error)
        if line is None:
            raise
        ours = next((cause for cause in causes(error) if isinstance(cause, LitFedError)), LitFedError())
        if _rank() == 0:
            details = f"{ours.details}\n" if ours.details else ""  # the traceback of the user's own code
            print(f"{details}lit-fed: error: {line}", file=sys.stderr)
        sys.exit(ours.status)
    except KeyboardInterrupt:
        sys.exit(130)
    else:
        if status:
            sys.exit(status)


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
        return brief(words_of(error))
    for cause in causes(error):
        if isinstance(cause, MemoryError) or (isinstance(cause, RuntimeError) and "allocate memory" in str(cause)):
            return reason(cause)
        if isinstance(cause, OSError) and cause.strerror and (cause.filename or cause.errno in _FULL):
            return f"{cause.filename}: {cause.strerror}" if cause.filename else cause.strerror
    return None


def _rank() -> int:
    """Rank of this process: only the first prints."""
    return getattr(rank_zero_only, "rank", 0) or 0
