"""The command line: ``python cli.py {fit,validate,test,predict,study,cost,simulate} -c …``, the same as ``lit-fed``."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import yaml
from jsonargparse import ArgumentError, DefaultHelpFormatter, Namespace
from lightning import seed_everything
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lit_fed.algorithm import Algorithm
from lit_fed.client import ClientModule
from lit_fed.errors import ClientFailure, ConfigError, LitFedError
from lit_fed.explain import explain
from lit_fed.trainer import FederatedTrainer

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # writing fails with these without naming the file
_FROM_DATA = ("num_classes", "in_channels", "input_shape")  # what a model left null is told about the data


class _HelpFormatter(DefaultHelpFormatter):
    """Help without a list of every class of torch, and without the marks of docstrings."""

    def _expand_help(self, action: argparse.Action) -> str:
        text, known, classes = super()._expand_help(action).partition(", known subclasses: ")
        names = classes.count(",") + 1
        return (text + known + (classes if names <= 20 else f"{names} of them)")).replace("``", "")


class _Parser(LightningArgumentParser):
    """A parser that passes its help format on to the parsers it makes for classes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **({"formatter_class": _HelpFormatter} | kwargs))


class FederatedCLI(LightningCLI):
    """LightningCLI with three halves: ``model`` (clients), ``algorithm`` (server) and ``data`` (population)."""

    def __init__(self, args: list[str] | None = None) -> None:
        from lit_fed.data import FederatedDataModule

        super().__init__(
            model_class=ClientModule,
            datamodule_class=FederatedDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_class=FederatedTrainer,  # type: ignore[arg-type]  # a Trainer in all that the CLI needs
            save_config_callback=None,
            parser_class=_Parser,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            # argparse would take --trainer.max for --trainer.max_rounds
            parser_kwargs={"allow_abbrev": False, "exit_on_error": False}
            | {name: {"allow_abbrev": False, "exit_on_error": False} for name in self.subcommands()},
            args=args,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser that names this program in what it writes."""
        from lit_fed import __version__

        kwargs.setdefault("dump_header", [f"lit_fed=={__version__}"])
        kwargs.setdefault("description", "Federated learning for PyTorch Lightning")
        kwargs.setdefault("version", __version__)
        kwargs.setdefault("epilog", "A grid of runs: lit-fed study --help; what a run will send: lit-fed cost -c …")
        return super().init_parser(**kwargs)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Nothing: all randomness follows from ``trainer.seed``."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The trainer's settings, and the model, data and algorithm by class."""
        from lit_fed.data import FederatedDataModule

        parser.add_class_arguments(self.trainer_class, "trainer", instantiate=False, sub_configs=True)
        parser.add_subclass_arguments(ClientModule, "model", required=True)
        parser.add_subclass_arguments(FederatedDataModule, "data", required=True)
        parser.add_subclass_arguments(Algorithm, "algorithm", required=True)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """What can be run, and the arguments that do not come from the command line."""
        return {name: {"model", "datamodule", "algorithm"} for name in ("fit", "validate", "test", "predict")}

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the command line, or arguments given in its place, which is all that Lightning warns about here."""
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Nothing: our checkpoints change no setting, and the trainer reads them with better errors."""

    def _set_seed(self) -> None:
        """Seed the making of the model, so that its first weights follow from ``trainer.seed``.

        Raises:
            ConfigError: If there is no such seed.
        """
        trainer = self._get(self.config, "trainer")
        if not isinstance(trainer, Namespace):  # the parser lets a lone value pass
            raise ConfigError(f"trainer is {trainer!r}; it must hold settings, such as max_rounds")
        if not 0 <= trainer.seed < 2**32:
            raise ConfigError(f"trainer.seed is {trainer.seed}; it must be at least 0 and below {2**32}")
        seed_everything(trainer.seed, verbose=False)

    def instantiate_classes(self) -> None:
        """Make the data first, then tell the model what it left open about them."""
        assert self.subcommand is not None
        config = self.config[self.subcommand]
        parser = self._parser(self.subcommand)
        self.datamodule = parser.instantiate(Namespace(data=config.data)).data
        fill_from_data(config.model, self.datamodule)
        rest = Namespace({key: value for key, value in config.items() if key != "data"})
        self.config_init = Namespace({self.subcommand: parser.instantiate(rest)})
        self.model = self.config_init[self.subcommand].model
        trainer = FederatedTrainer(**self.config_init[self.subcommand].trainer)
        trainer.config = self._resolved_config()
        self.trainer: Any = trainer

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        kwargs["algorithm"] = self.config_init[subcommand].algorithm
        return kwargs

    def _resolved_config(self) -> str:
        """The configuration as YAML, without what belongs to this one call."""
        assert self.subcommand is not None
        parser = self._parser(self.subcommand)
        config = self.config[self.subcommand].clone()
        for key in self._subcommand_method_arguments[self.subcommand]:
            config.pop(key, None)
        config.pop("config", None)
        dumped: str = parser.dump(config, skip_unset=False, skip_validation=True)
        return dumped


def fill_from_data(model: Namespace, data: Any) -> None:
    """Tell a model's configuration the data's number of classes and shape, where it asks and was not told.

    Raises:
        ConfigError: If the model was told another number of classes than the data have.
    """
    init_args = model.init_args
    for key in _FROM_DATA:
        if key not in init_args or not hasattr(data, key):
            continue
        known = getattr(data, key)
        if init_args[key] is None:
            init_args[key] = known
        elif key == "num_classes" and init_args[key] < known:
            raise ConfigError(f"model.num_classes is {init_args[key]}, but the data have {known} classes")


def build_module(config: str) -> ClientModule:
    """Make the module that a run's resolved configuration (YAML) describes, with untrained weights."""
    parser = LightningArgumentParser()
    parser.add_subclass_arguments(ClientModule, "model", required=True)
    parsed = parser.parse_object({"model": yaml.safe_load(config)["model"]})
    module: ClientModule = parser.instantiate(parsed).model
    return module


def main(args: list[str] | None = None) -> None:
    """Run the command line; a user's mistake ends in one line on stderr and exit status 2.

    Args:
        args: Arguments instead of ``sys.argv[1:]``.
    """
    import lit_fed.callbacks
    import lit_fed.data
    import lit_fed.methods
    import lit_fed.participation
    import lit_fed.protocols  # noqa: F401  # imported so that short class names resolve

    for name in ("lightning.fabric", "lightning.pytorch"):  # how processes find each other tells a user nothing
        logging.getLogger(name).setLevel(logging.WARNING)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a user's own classes lie in the working directory, also for the installed script
    words = sys.argv[1:] if args is None else args
    try:
        if words[:1] == ["study"]:
            from lit_fed.studies.command import run_studies  # what other commands need not load

            sys.exit(run_studies(words[1:]))
        if words[:1] == ["cost"]:
            from lit_fed.cost import run

            run(words[1:])
            return
        if words[:1] == ["simulate"]:
            from lit_fed.simulations.command import simulate

            simulate(words[1:])
            return
        FederatedCLI(args)
    except ClientFailure as error:
        if error.details and _rank() == 0:
            print(error.details, file=sys.stderr)  # the user's own code raised this: show where
        _fail(str(error))
    except Exception as error:
        line = user_error(error, words)
        if line is None:
            raise
        _fail(line)
    except KeyboardInterrupt:
        sys.exit(130)


def user_error(error: BaseException, args: Sequence[str]) -> str | None:
    """One line about a mistake that a user can mend; None for an error whose place in the code matters."""
    chain = [error]
    while chain[-1].__cause__ is not None:  # the parser wraps what the constructor of a class raised
        chain.append(chain[-1].__cause__)
    for cause in chain:
        if isinstance(cause, LitFedError):
            return str(cause)
    if isinstance(error, ArgumentError):
        return explain(str(error), args)
    for cause in chain:
        if isinstance(cause, OSError) and cause.strerror and (cause.filename or cause.errno in _FULL):
            return f"{cause.filename}: {cause.strerror}" if cause.filename else cause.strerror
    return None


def _rank() -> int:
    """This process's rank: only the first one speaks."""
    return getattr(rank_zero_only, "rank", 0) or 0


def _fail(message: str) -> None:
    if _rank() == 0:
        print(f"lit-fed: error: {message}", file=sys.stderr)
    sys.exit(2)
