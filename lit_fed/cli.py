"""The command line: ``python cli.py {fit,validate,test,predict} --config …``, the same as ``lit-fed``."""

from __future__ import annotations

import inspect
import re
import sys
from difflib import get_close_matches
from typing import Any

import yaml
from jsonargparse import ArgumentError, Namespace
from lightning import seed_everything
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lit_fed.algorithm import Algorithm
from lit_fed.client import ClientModule
from lit_fed.errors import ClientFailure, ConfigError, LitFedError
from lit_fed.trainer import FederatedTrainer

_FROM_DATA = ("num_classes", "in_channels", "input_shape")  # what a model left null is told about the data


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

    def _parse_ckpt_path(self) -> None:
        """Nothing: our checkpoints change no setting, and the trainer reads them with better errors."""

    def _set_seed(self) -> None:
        """Seed the making of the model, so that its first weights follow from ``trainer.seed``."""
        seed_everything(self._get(self.config, "trainer").seed, verbose=False)

    def instantiate_classes(self) -> None:
        """Make the data first, then tell the model what it left open about them."""
        assert self.subcommand is not None
        config = self.config[self.subcommand]
        parser = self._parser(self.subcommand)
        self.datamodule = parser.instantiate_classes(Namespace(data=config.data)).data
        fill_from_data(config.model, self.datamodule)
        rest = Namespace({key: value for key, value in config.items() if key != "data"})
        self.config_init = Namespace({self.subcommand: parser.instantiate_classes(rest)})
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
        dumped: str = parser.dump(config, skip_none=False, skip_validation=True)
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
    module: ClientModule = parser.instantiate_classes(parsed).model
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

    try:
        FederatedCLI(args)
    except ArgumentError as error:
        _fail(explain(str(error)))
    except ClientFailure as error:
        if error.details and _rank() == 0:
            print(error.details, file=sys.stderr)  # the user's own code raised this: show where
        _fail(str(error))
    except LitFedError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _rank() -> int:
    """This process's rank: only the first one speaks."""
    return getattr(rank_zero_only, "rank", 0) or 0


def _fail(message: str) -> None:
    if _rank() == 0:
        print(f"lit-fed: error: {message}", file=sys.stderr)
    sys.exit(2)


_NOISE = re.compile(
    r"Does not validate against|Subtypes: |Errors:|Given value|Expected a <class 'NoneType'>|Expected a path but"
)


def explain(message: str) -> str:
    """Boil a parser's nested report down to one line that names the culprit, with what may have been meant."""
    parts: list[str] = []
    for line in message.splitlines():
        text = line.strip(" -:")
        if text and not _NOISE.search(text) and text not in parts:
            parts.append(re.sub(r'^Parser key "([^"]+)"', r"\1", text))
    joined = ": ".join(parts)
    joined = re.sub(r"<class '(\w+)'>", r"\1", joined)
    joined = re.sub(r"Problem with given class_path '(?:\w+\.)*(\w+)'", r"\1", joined)
    joined = re.sub(r"Option '([^']+)' is not accepted", r"unknown key '\1'", joined)
    joined = re.sub(r"Expected a dot import path string: (\S+)", r"there is no class named '\1'", joined)
    unknown = re.search(r"unrecognized arguments: --(\S+)|no class named '([^']+)'|unknown key '([^']+)'", joined)
    if unknown:
        word = next(group for group in unknown.groups() if group)
        close = get_close_matches(word.split("=")[0], _vocabulary(), n=1)
        joined += f"; did you mean {close[0]!r}?" if close else ""
    return joined


def _vocabulary() -> list[str]:
    """Names that may have been meant: classes by short name, and settings of the trainer and of those classes."""
    from lit_fed.callbacks import Callback
    from lit_fed.data import FederatedDataModule, Partition
    from lit_fed.participation import Participation
    from lit_fed.protocols import Protocol

    words = {f"trainer.{name}" for name in inspect.signature(FederatedTrainer).parameters}
    todo: list[type] = [ClientModule, Algorithm, FederatedDataModule, Partition, Callback, Participation, Protocol]
    while todo:
        found = todo.pop()
        words |= {found.__name__, *inspect.signature(found).parameters}
        todo += found.__subclasses__()
    return sorted(words)
