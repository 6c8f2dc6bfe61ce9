"""What a user holds: a trainer that owns Fabric, and fits, evaluates and predicts with a federation."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning import Callback as LightningCallback
from lightning import LightningModule
from lightning.fabric.strategies.strategy import Strategy
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger

from lit_fed.callbacks import Callback, default_callbacks, lightning_watchers
from lit_fed.callbacks.progress import print_evaluation
from lit_fed.engine.clients.executor import Executor
from lit_fed.engine.clients.guard import Guard
from lit_fed.engine.clients.local import TaskStage
from lit_fed.engine.clients.session import Session
from lit_fed.engine.evaluation.prediction import check_output, one_client
from lit_fed.engine.evaluation.protocols import EvalSubset, Protocol, check_names, check_protocols
from lit_fed.engine.lightning.options import GradientOptions, NetworkOptions
from lit_fed.engine.loop.assemble import assemble
from lit_fed.engine.loop.checkpoint import save_checkpoint
from lit_fed.engine.loop.executors import EXECUTORS, ExecutorName
from lit_fed.engine.loop.inference import evaluate, predict
from lit_fed.engine.loop.rounds import run_rounds
from lit_fed.engine.loop.run import Run, RunSettings
from lit_fed.engine.loop.runs import check_loggers, check_server, open_run
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.engine.method.client import local_work
from lit_fed.engine.method.kinds import ONLY, Kinds, assign
from lit_fed.engine.method.model import BufferPolicy
from lit_fed.engine.method.wrapper import Privacy, Wrappers
from lit_fed.engine.storage.packs import PackedFiles
from lit_fed.engine.storage.store import ClientStore
from lit_fed.engine.wire.payload import Channel, Codec
from lit_fed.engine.wire.workers import build_fabric, launch, leave_processes, on_first_process, raise_if_lost
from lit_fed.errors import ConfigError, LitFedError, ProcessLost
from lit_fed.machine import most_threads
from lit_fed.participation import FullParticipation, Participation
from lit_fed.printing import unfailing
from lit_fed.protocols import ClientTest, GlobalTest

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule

R = TypeVar("R")
Tasks = LightningModule | Mapping[str, LightningModule]


class FederatedTrainer:
    """Runs the rounds of a federation, and evaluates and predicts with what they gave.

    Args:
        accelerator: As in Lightning: ``auto``, ``cpu``, ``gpu``, ….
        devices: How many devices (on CPU: processes), or which.
        num_nodes: Machines, started by ``torchrun`` or SLURM.
        strategy: ``clients`` spreads the clients over the devices (what ``auto`` means on several), ``ddp`` trains
            every client data-parallel on all of them; or a DDP strategy object.
        precision: ``32-true``, ``bf16-mixed``, ``16-mixed``, … as in Lightning.
        max_rounds: Rounds in all, those before a resume counted in.
        local_epochs: Passes over a client's data in a round, also fractions (0.5); 1 where `local_steps` is null too.
        local_steps: Batches a client trains on in a round, instead of epochs.
        seed: All randomness of the run follows from it.
        participation: Who takes part in a round; everybody by default.
        kinds: Networks by client, where they have different ones: by name the settings of the model that differ, and
            ``clients``, the names of those who have it (0, 1, … where clients have no names), or ``client_positions``;
            clients take the kinds in turn where none names any. In Python, give ``fit`` a model for each name.
        executor: How a cohort is trained: ``sequential``, one client after the other; ``vectorized``, in groups as one
            computation; ``auto``, in groups where that is faster.
        callbacks: Listeners, before the default ones (progress, record, dashboard, checkpoint); Lightning's own
            watch the clients' local work.
        logger: True for TensorBoard, False for none, or Lightning loggers.
        default_root_dir: Where ``lightning_logs`` is made; the working directory by default.
        evaluate_every: Run the protocols every so many rounds and after the last; 0 for never.
        evaluate_on: ``test``, or ``val`` to choose rounds and stop early on held-out training data.
        protocols: What to evaluate; `GlobalTest` and `ClientTest` by default.
        buffers: Policy for buffers such as batch-norm statistics: ``average``, ``local`` or ``server``.
        on_client_failure: ``raise`` stops the run with the client's id, ``skip`` goes on without its update, says each
            cause once, and stops where nobody is left.
        client_timeout: Seconds that a client may train in a round; one that takes longer has failed. Null for no limit.
        compile: Compile the model's networks with ``torch.compile``.
        channels_last: Lay clients' batches of images (4 dimensions) out with a pixel's channels side by side.
        gradient_clip_val: Clip the clients' gradients at this value.
        gradient_clip_algorithm: ``norm`` or ``value``.
        accumulate_grad_batches: Batches per optimizer step.
        uplink_codec: What is done to the clients' payloads on the wire.
        downlink_codec: What is done to the broadcast on the wire.
        client_store: Where client states live between rounds: on ``disk``, or also in ``memory``, which is faster and
            grows with the population.
        enable_progress_bar: Show progress on the terminal.
        enable_checkpointing: Write ``last.ckpt`` and ``best.ckpt``.
        num_threads: CPU threads of each process, null for torch's choice. Kernels sum in another order with another
            number of threads; set it to get bit-identical weights with another number of processes.
        deterministic: Let torch refuse (or with ``warn`` name) operations on a GPU that differ from run to run.
        privacy: Differential privacy around the method, such as `lit_fed.privacy.ClientLevel`; null for none.

    Raises:
        ConfigError: For settings that contradict each other or cannot work.
    """

    def __init__(
        self,
        accelerator: str = "auto",
        devices: list[int] | int | str = "auto",
        num_nodes: int = 1,
        strategy: str | Strategy = "auto",
        precision: str | int = "32-true",
        max_rounds: int = 100,
        local_epochs: float | None = None,
        local_steps: int | None = None,
        seed: int = 0,
        participation: Participation | None = None,
        kinds: dict[str, dict] | None = None,  # type: ignore[type-arg]  # of Any, the parser would make objects of them
        executor: ExecutorName = "sequential",
        callbacks: list[Callback | LightningCallback] | None = None,
        logger: bool | Logger | list[Logger] = True,
        default_root_dir: str | None = None,
        evaluate_every: int = 1,
        evaluate_on: Literal["test", "val"] = "test",
        protocols: list[Protocol] | None = None,
        buffers: BufferPolicy = "average",
        on_client_failure: Literal["raise", "skip"] = "raise",
        client_timeout: float | None = None,
        compile: bool = False,
        channels_last: bool = False,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        accumulate_grad_batches: int = 1,
        uplink_codec: Codec | None = None,
        downlink_codec: Codec | None = None,
        client_store: Literal["memory", "disk"] = "disk",
        enable_progress_bar: bool = True,
        enable_checkpointing: bool = True,
        num_threads: int | None = None,
        deterministic: bool | Literal["warn"] = False,
        privacy: Privacy | None = None,
    ) -> None:
        for key, value, least in (
            ("max_rounds", max_rounds, 1),
            ("evaluate_every", evaluate_every, 0),
            ("accumulate_grad_batches", accumulate_grad_batches, 1),
            ("num_threads", num_threads, 1),
            ("local_steps", local_steps, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(f"trainer.{key} is {value}; it must be at least {least}")
        if num_threads is not None and num_threads > most_threads():
            raise ConfigError(f"trainer.num_threads is {num_threads}; this machine can have at most {most_threads()}")
        if gradient_clip_val is not None and gradient_clip_val <= 0:
            raise ConfigError(
                f"trainer.gradient_clip_val is {gradient_clip_val}; it must be positive, or null for none"
            )
        logs = Path(default_root_dir or ".") / "lightning_logs"
        check_loggers(logger, logs)
        protocols = [GlobalTest(), ClientTest()] if protocols is None else protocols
        check_names(protocols)
        self.fabric = build_fabric(accelerator, devices, num_nodes, strategy, precision)
        given, self.watchers = lightning_watchers(callbacks or [])
        self.callbacks = default_callbacks(given, enable_progress_bar, enable_checkpointing)
        self.settings = RunSettings(
            max_rounds=max_rounds,
            seed=seed,
            evaluate_every=evaluate_every,
            evaluate_on=evaluate_on,
            protocols=protocols,
            on_client_failure=on_client_failure,
            logs=logs,
            logger=logger,
        )
        self.guard = Guard(client_timeout)
        self.work = local_work(local_epochs, local_steps)
        self.gradients = GradientOptions(gradient_clip_val, gradient_clip_algorithm, accumulate_grad_batches)
        self.channel = Channel(uplink_codec, downlink_codec)
        self.participation = participation or FullParticipation()
        self.kinds = kinds
        self.make_executor: Callable[[Session], Executor] = EXECUTORS[executor]
        self.buffers: BufferPolicy = buffers
        self.networks = NetworkOptions(compile, channels_last)
        self.client_store: Literal["memory", "disk"] = client_store
        self.num_threads, self.deterministic = num_threads, deterministic
        self.wrappers = Wrappers([wrapper for wrapper in (privacy,) if wrapper is not None])
        self._run: Run | None = None
        self._parts: tuple[Any, Any, Any] | None = None
        self._launched = False

    # ------------------------------------------------------------------ what a user calls

    def fit(
        self,
        model: Tasks,
        datamodule: FederatedDataModule,
        algorithm: Algorithm[Any],
        ckpt_path: str | None = None,
    ) -> None:
        """Train a federation.

        Called again with the same parts, it goes on after the last finished round.

        Args:
            model: What is learnt: any LightningModule, or one for each of ``trainer.kinds`` by name.
            datamodule: The population.
            algorithm: How it is federated.
            ckpt_path: Resume from here: ``last`` (of the newest run), a checkpoint file, or a run folder.
        """
        self._launch(lambda: self._fit(model, datamodule, algorithm, ckpt_path))

    def validate(
        self,
        model: Tasks,
        datamodule: FederatedDataModule,
        algorithm: Algorithm[Any],
        ckpt_path: str | None = None,
    ) -> dict[str, float]:
        """Run every protocol on the validation data and print a table.

        Args:
            model: What was learnt.
            datamodule: The population, with ``val_fraction`` above 0.
            algorithm: How it was federated.
            ckpt_path: ``last``, ``best``, a file or a run folder; None for the model just trained.
        """
        return self._launch(
            lambda: self._evaluate(self.assemble(model, datamodule, algorithm, "validate"), ckpt_path, "val")
        )

    def test(
        self,
        model: Tasks,
        datamodule: FederatedDataModule,
        algorithm: Algorithm[Any],
        ckpt_path: str | None = None,
    ) -> dict[str, float]:
        """Run every protocol on the test data and print a table.

        Args:
            model: What was learnt.
            datamodule: The population.
            algorithm: How it was federated.
            ckpt_path: ``last``, ``best``, a file or a run folder; None for the model just trained.
        """
        return self._launch(
            lambda: self._evaluate(self.assemble(model, datamodule, algorithm, "test"), ckpt_path, "test")
        )

    def predict(
        self,
        model: Tasks,
        datamodule: FederatedDataModule,
        algorithm: Algorithm[Any],
        ckpt_path: str | None = None,
        client_id: str | None = None,
        client_position: int | None = None,
        output: str = "predictions.csv",
        inputs: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write predictions on the shared test set, on one client's own, or on inputs of another file, to a file.

        Args:
            model: What was learnt.
            datamodule: The population.
            algorithm: How it was federated.
            ckpt_path: ``last``, ``best``, a file or a run folder; None for the model just trained.
            client_id: Predict as this client on its own test data: its name, or "0", "1", … where clients have none;
                None for the global model.
            client_position: Predict as the client at this position, from 0, whatever it is called.
            output: File to write: ``.csv`` (one row a sample) or ``.npz`` (one array per output).
            inputs: Predict on these: a table, ``.npz`` arrays, or a folder of images, as the data module reads them.
            overwrite: Replace a file that is there.
        """

        def work() -> Path:
            on_first_process(self.fabric, lambda: check_output(Path(output), overwrite))
            run = self.assemble(model, datamodule, algorithm, "predict")
            chosen = one_client(run.federation.data, client_id, client_position)
            return predict(run, ckpt_path, chosen, Path(output), None if inputs is None else Path(inputs))

        return self._launch(work)

    def describe(self, config: str, told: tuple[str, ...] = ()) -> None:
        """Take in the resolved configuration as YAML, which the run's folder keeps, and what of it was asked for."""
        self.settings = replace(self.settings, config=config, told=told)

    @property
    def max_rounds(self) -> int:
        """Rounds in all; raise it to let `fit` go on with the federation it has trained."""
        return self.settings.max_rounds

    @max_rounds.setter
    def max_rounds(self, rounds: int) -> None:
        if rounds < 1:
            raise ConfigError(f"trainer.max_rounds is {rounds}; it must be at least 1")
        self.settings = replace(self.settings, max_rounds=rounds)

    @property
    def run(self) -> Run:
        """The run under way, or the last one; a `ConfigError` if nothing has been run yet."""
        if self._run is None:
            raise ConfigError("this trainer has not run anything yet; call fit, validate, test or predict")
        return self._run

    @property
    def metrics(self) -> dict[str, float]:
        """What the last round gave, by name."""
        return self.run.metrics

    @property
    def log_dir(self) -> Path:
        """The run's folder."""
        return self.run.log_dir

    def save_checkpoint(self, path: str | Path) -> None:
        """Write the state after the last finished round; called on every process, written by the first.

        Raises:
            CheckpointError: If it is not finite, or cannot be written; an older file of that name is then still there.
        """
        check_server(self.run, "this trainer")
        save_checkpoint(self.run, Path(path))

    def _evaluate(self, run: Run, ckpt_path: str | None, subset: EvalSubset) -> dict[str, float]:
        metrics = evaluate(run, ckpt_path, subset)
        if self.fabric.is_global_zero:
            print_evaluation(metrics, subset, run.next_round, run.origin)
        return metrics

    # ------------------------------------------------------------------ set-up

    def _fit(self, model: Tasks, data: FederatedDataModule, algorithm: Algorithm[Any], ckpt_path: str | None) -> None:
        run = self.assemble(model, data, algorithm, "fit")
        if run.settings.evaluate_every:
            check_protocols(run.settings.protocols, run.federation, run.settings.evaluate_on)
        with self.guard.on_duty(run.workers.data_parallel), open_run(run, ckpt_path):
            if run.start_round >= run.max_rounds:
                self.fabric.print(f"all {run.start_round} rounds are done already; raise trainer.max_rounds to go on")
            with self.fabric.rank_zero_first():
                self.wrappers.begin(run.settings.max_rounds, run.start_round > 0 or ckpt_path is not None)
            with run.federation.session.at_work("fit"):
                run_rounds(run)
                for kind, trained in run.federation.global_models(max(run.next_round - 1, 0)).items():
                    run.federation.loops[kind].model.load(trained)  # what the caller holds is the trained global model

    def _launch(self, function: Callable[[], R]) -> R:
        atexit.unregister(leave_processes)  # an unexpected error may leave this process in a collective: just exit
        try:
            with unfailing():
                if self._launched:
                    result: R = function()
                else:
                    # A strategy that forks ends its processes with the function; others keep them for the next call.
                    self._launched = getattr(self.fabric.strategy, "_start_method", "popen") == "popen"
                    result = launch(self.fabric, function)
        except ProcessLost:
            raise
        except LitFedError:  # ours are raised between collectives
            atexit.register(leave_processes)
            raise
        except RuntimeError as error:
            raise_if_lost(error)
            raise
        atexit.register(leave_processes)
        return result

    def assemble(self, model: Tasks, data: FederatedDataModule, algorithm: Algorithm[Any], stage: TaskStage) -> Run:
        """Put the parts together for a stage, check that they fit, and set them up; nothing is trained."""
        if self._run is not None and self._parts == (model, data, algorithm):
            self._run.settings = self.settings
            for loop in self._run.federation.loops.values():
                loop.trainer.max_epochs = self.settings.max_rounds
            return self._run
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is refused altogether
            torch.use_deterministic_algorithms(True, warn_only=self.deterministic == "warn")
        tasks = dict(model) if isinstance(model, Mapping) else {ONLY: model}
        for name, task in tasks.items():
            if not isinstance(task, LightningModule):
                raise ConfigError(f"model {name} is a {type(task).__name__}; it must be a LightningModule")
        federation = assemble(
            self.fabric,
            tasks,
            self.kinds_of(tasks),
            data,
            algorithm,
            participation=self.participation,
            work=self.work,
            gradients=self.gradients,
            channel=self.channel,
            store=ClientStore(self.client_store, PackedFiles),
            executor=self.make_executor,
            buffers=self.buffers,
            networks=self.networks,
            watchers=self.watchers,
            max_rounds=self.settings.max_rounds,
            seed=self.settings.seed,
            guard=self.guard,
            wrappers=self.wrappers,
            protocols=self.settings.protocols,
            stage=stage,
        )
        for loop in federation.loops.values():
            loop.trainer.loggers = [DummyLogger()] if self.settings.logger else []  # until the run opens its own
        self._run = Run(federation, self.settings, self.callbacks)
        for task in tasks.values():
            self._run.names.declare(task)
        self._parts = (model, data, algorithm)
        return self._run

    def kinds_of(self, model: Tasks) -> Kinds:
        """Which client has which of the models.

        Raises:
            ConfigError: If the models are not those of ``trainer.kinds``.
        """
        return assign(model if isinstance(model, Mapping) else {ONLY: model}, self.kinds)
