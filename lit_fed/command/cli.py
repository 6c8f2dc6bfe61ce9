"""Command line: ``lit-fed COMMAND …``, the same as ``python -m lit_fed COMMAND …``, with the commands of the table."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning import LightningModule
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from lit_fed.checks import check_local
from lit_fed.command.command import Call
from lit_fed.command.endings import ending_told, witness
from lit_fed.command.reading.config_files import ConfigFiles
from lit_fed.command.reading.own import add_overwrite
from lit_fed.command.reading.parts import add_parts, build_parts, check_parts_given, set_seed
from lit_fed.command.reading.words import CommandLine
from lit_fed.command.refusals.explain import causes, explain
from lit_fed.command.roots import PARTS, import_named
from lit_fed.command.table import COMMANDS
from lit_fed.errors import ConfigError, LitFedError, brief, reason, told_as_options
from lit_fed.parsing import Parser
from lit_fed.trainer import FederatedTrainer

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # errors of writing that do not name the file
_OF_PREDICT = {"client", "output", "overwrite"}


class FederatedCLI(LightningCLI):
    """LightningCLI with an algorithm, and with commands beside the trainer's.

    Args:
        args: Arguments instead of ``sys.argv[1:]``.
        files: Files that are read already, where several command lines share some.

    Attributes:
        status: Exit status of a command that is not the trainer's.
    """

    status = 0

    def __init__(self, args: list[str] | None = None, files: ConfigFiles | None = None) -> None:
        self._words = sys.argv[1:] if args is None else list(args)
        self._line = CommandLine(self._words, files)
        super().__init__(
            model_class=LightningModule,
            datamodule_class=PARTS["data"],
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_class=FederatedTrainer,  # type: ignore[arg-type]  # has every attribute that the CLI uses
            save_config_callback=None,
            parser_class=Parser,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={"exit_on_error": False},  # which commands' parsers inherit
            args=args,
        )

    # ------------------------------------------------------------------ the parser

    @override
    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Make a command's parsers once a process: that takes as long as reading three commands."""
        command = self._line.command
        key = tuple(filter(self._has_options, COMMANDS)), COMMANDS[command].room_of(self._words) if command else ""
        if key not in _PARSERS:
            super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
            names = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")
            _PARSERS[key] = {name: vars(self)[name] for name in names}
        vars(self).update(_PARSERS[key])

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        from lit_fed import __version__

        kwargs.setdefault("dump_header", [f"lit_fed=={__version__}"])
        kwargs.setdefault("description", "Federated learning for PyTorch Lightning")
        kwargs.setdefault("version", __version__)
        kwargs.setdefault("prog", "lit-fed")
        return super().init_parser(**kwargs)

    @override
    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add no ``seed_everything``: all randomness follows from ``trainer.seed``."""

    @override
    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_parts(parser)

    @override
    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The trainer's commands, each with the arguments of its method that are not options."""
        skipped = {"model", "datamodule", "algorithm"}
        return {
            name: skipped | (_OF_PREDICT if name == "predict" else set())
            for name, line in COMMANDS.items()
            if not line.room
        }

    @override
    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        """Add all commands of the table; only the one that is called gets its options."""
        self._subcommand_parsers = {}
        actions = parser.add_subcommands()
        for name, line in COMMANDS.items():
            wanted = self._has_options(name)
            if wanted and not line.room_of(self._words):
                also = f" On a node: --state_dir DIR, whose options are in lit-fed {name} --state_dir DIR --help."
                description = line.help + (also if line.at_home else "")
                made = self._prepare_subcommand_parser(FederatedTrainer, name, description=description)
                if name == "predict":
                    self._add_to_predict(made)
            else:
                made = Parser(description=line.help)
                if wanted:
                    line.load(self._words).add_arguments(made)
            self._subcommand_parsers[name] = made
            actions.add_subcommand(name, made, help=line.help)

    def _add_to_predict(self, parser: ArgumentParser) -> None:
        """Add options that differ from the arguments: null is a name, a file is written, and a flag needs no value."""
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
        self._subcommand_method_arguments["predict"] += sorted(_OF_PREDICT)

    def _has_options(self, name: str) -> bool:
        """Whether a command gets its options: only the one that is called, so that others cost no import."""
        return name == self._line.command

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read settings by the command's own parser; that of all commands prints."""
        line, command = self._line, str(self._line.command)
        if line.words[:1] != [command] or "--help" in line.words or "-h" in line.words:
            self.config = parser.parse_args(line.words)
            return
        self.config = Namespace({"subcommand": command, command: line.parse(self._parser(command))})
        if line.prints:
            parser.parse_args([command, *line.prints], self.config)
        if not self._room:
            check_parts_given(self.config[command])

    @override
    def _parse_ckpt_path(self) -> None:
        """Leave checkpoints to the trainer: they change no setting, and its errors say more."""

    # ------------------------------------------------------------------ running

    @property
    def _room(self) -> str:
        return COMMANDS[str(self._line.command)].room_of(self._words)

    @override
    def _set_seed(self) -> None:
        if not self._room:
            set_seed(self._get(self.config, "trainer"))

    @override
    def instantiate_classes(self) -> None:
        """Make the parts and the trainer for one of the trainer's commands."""
        if self._room:
            return
        assert self.subcommand is not None
        parts, rest = build_parts(self._parser(self.subcommand), self.config[self.subcommand])
        self.model, self.datamodule = parts.model, parts.data
        self.config_init = Namespace({self.subcommand: rest})
        trainer = FederatedTrainer(**rest.trainer)
        trainer.describe(self._resolved_config(), self._line.told)
        if self.subcommand == "fit" and _rank() == 0 and (line := self._line.own_rate):
            print(line)
        self.trainer: Any = trainer

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        if self._room:
            call = Call(self.config[subcommand], self._parser(subcommand), self._words)
            for key in ("output", "state_dir"):
                check_local(f"--{key}", call.settings.get(key) or "")
            self.status = COMMANDS[subcommand].load(self._words).run(call)
            return
        with ExitStack() as stack:
            stack.enter_context(ending_told())
            if _rank() == 0:
                self.trainer.local.guard.tell = stack.enter_context(
                    witness("continue with --ckpt_path last" if subcommand == "fit" else "")
                )
            super()._run_subcommand(subcommand)

    @override
    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        kwargs["algorithm"] = self.config_init[subcommand].algorithm
        return kwargs

    def _resolved_config(self) -> str:
        """The configuration as YAML, without the command's own arguments."""
        assert self.subcommand is not None
        parser = self._parser(self.subcommand)
        config = self.config[self.subcommand].clone()
        for key in self._subcommand_method_arguments[self.subcommand]:
            config.pop(key, None)
        config.pop("config", None)
        dumped: str = parser.dump(config, skip_unset=False, skip_validation=True)
        return dumped


class Reading(FederatedCLI):
    """A command line that is read and not run."""

    @override
    def instantiate_classes(self) -> None:
        """Make nothing."""

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


_PARSERS: dict[tuple[tuple[str, ...], str], dict[str, Any]] = {}
"""Parsers by the commands whose options they have, and the room."""


def resolve(words: Sequence[str], files: ConfigFiles | None = None) -> str:
    """Read a command line of the trainer without running it.

    Args:
        words: The command line, from the command on.
        files: Files that are read already.

    Returns:
        The resolved configuration as YAML.
    """
    return Reading(list(words), files)._resolved_config()


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
        with told_as_options():
            check_text(words)
            import_named()
            status = FederatedCLI(args).status
    except Exception as error:
        line = user_error(error, words)
        if line is None:
            raise
        ours = next((cause for cause in causes(error) if isinstance(cause, LitFedError)), None)
        if ours is not None and ours.details and _rank() == 0:
            print(ours.details, file=sys.stderr)  # the traceback of the user's own code
        _fail(line, ours.status if ours is not None else 2)
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


def user_error(error: BaseException, args: Sequence[str]) -> str | None:
    """One line about a mistake that a user can correct; None for an error that needs its traceback."""
    for cause in causes(error):
        if isinstance(cause, LitFedError):
            return str(cause)
    if isinstance(error, ArgumentError):
        return brief(explain(error, args))
    for cause in causes(error):
        if isinstance(cause, MemoryError) or (isinstance(cause, RuntimeError) and "allocate memory" in str(cause)):
            return reason(cause)
        if isinstance(cause, OSError) and cause.strerror and (cause.filename or cause.errno in _FULL):
            return f"{cause.filename}: {cause.strerror}" if cause.filename else cause.strerror
    return None


def _rank() -> int:
    """Rank of this process: only the first prints."""
    return getattr(rank_zero_only, "rank", 0) or 0


def _fail(message: str, status: int) -> None:
    if _rank() == 0:
        print(f"lit-fed: error: {message}", file=sys.stderr)
    sys.exit(status)
