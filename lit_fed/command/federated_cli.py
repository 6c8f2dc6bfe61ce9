"""A command line with the settings of a run, and its command: what needs PyTorch and Lightning."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from jsonargparse import Namespace
from typing_extensions import override

from lit_fed.command.command import Call
from lit_fed.command.endings import exit_reported, is_first, witness
from lit_fed.command.parsers import make_parsers
from lit_fed.command.reading.config_files import SECTIONS, ConfigFiles
from lit_fed.command.reading.own import add_overwrite
from lit_fed.command.reading.parts import add_parts, build_parts, check_parts_given, set_seed
from lit_fed.command.reading.words import CommandLine
from lit_fed.command.refusals.spelling import no_command
from lit_fed.command.roots import import_named
from lit_fed.command.table import COMMANDS, asked
from lit_fed.errors import ConfigError
from lit_fed.parsing import Parser
from lit_fed.trainer import FederatedTrainer

_OPTIONS_OF_PREDICT = ("client", "output", "overwrite")


class FederatedCLI:
    """A command line that is read, and whose command is run.

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
        import_named()
        self._words = sys.argv[1:] if args is None else list(args)
        self._command = str(asked(self._words))
        known, files = COMMANDS.get(self._command), files or ConfigFiles()
        self._room = known.room_of(self._words) if known is not None else ""
        key = tuple(filter(self._has_options, COMMANDS)), self._room
        if key not in _PARSERS:  # once a process: that takes as long as reading three commands
            _PARSERS[key] = make_parsers(self._words, self._has_options, _add_trainers)
        self.parser, self._parsers = _PARSERS[key]
        if known is not None and self._words[0] == self._command:
            known.admit(self._words, files, self._parser(self._command))
        self._line = CommandLine(self._words, files)
        try:
            self._read()
            self._run()
        except ConfigError as error:
            error.args = (self._line.settings.located(str(error)),)
            raise

    # ------------------------------------------------------------------ the parser

    def _has_options(self, name: str) -> bool:
        """Whether a command gets its options: only the one that is called, so that others cost no import."""
        return name == self._command

    def _parser(self, command: str) -> Parser:
        return self._parsers[command]

    def _read(self) -> None:
        """Read settings by the command's own parser; that of all commands prints."""
        if self._words[:1] != [self._command]:
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
            self.status = COMMANDS[self._command].run(Call(settings, parser, self._words))
            return
        set_seed(settings.trainer)
        parts, rest = build_parts(parser, settings)
        self.model, self.datamodule, self.trainer = parts.model, parts.data, FederatedTrainer(**rest.trainer)
        self.trainer.describe(self.resolved_config(), self._line.given_keys)
        is_fit = self._command == "fit"
        if is_fit and is_first() and (line := self._line.own_rate):
            print(line)
        with ExitStack() as stack:
            stack.enter_context(exit_reported())
            if is_first():
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
