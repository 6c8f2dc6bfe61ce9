"""The trainer: owns Fabric, and fits, evaluates and predicts with a federation."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

from lightning import Callback as LightningCallback
from lightning import LightningModule
from lightning.fabric.strategies.strategy import Strategy
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger

from lit_fed.arguments import Checked, checked
from lit_fed.callbacks import Callback, Checkpoint, EarlyStopping, default_callbacks, lightning_watchers
from lit_fed.callbacks.progress import print_evaluation
from lit_fed.callbacks.timer import Timer
from lit_fed.checks import check_range
from lit_fed.data import FederatedDataModule
from lit_fed.engine.clients.guard import Guard
from lit_fed.engine.clients.local import TaskStage
from lit_fed.engine.evaluation.prediction import check_output, one_client
from lit_fed.engine.evaluation.protocols import EvalSubset, Protocol, check_protocols
from lit_fed.engine.lightning.task_trainer import (
    ClientOptimizer,
    Compile,
    GradientOptions,
    NetworkOptions,
    ScheduleSteps,
)
from lit_fed.engine.loop.assemble import ExecutorName, assemble, executor_maker
from lit_fed.engine.loop.checkpoint import save_checkpoint
from lit_fed.engine.loop.choice import check_monitors
from lit_fed.engine.loop.inference import evaluate, loaded, predict
from lit_fed.engine.loop.rounds import run_rounds
from lit_fed.engine.loop.run import Run
from lit_fed.engine.loop.runs import check_server, open_run
from lit_fed.engine.loop.settings import LocalSettings, OnFailure, RunParts, RunSettings
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.engine.method.client import local_work
from lit_fed.engine.method.kinds import ONLY, Kinds, assign
from lit_fed.engine.method.model import BufferPolicy
from lit_fed.engine.method.wrapper import Aggregation, Attack, Privacy, Wrappers
from lit_fed.engine.storage.store import ClientStore
from lit_fed.engine.wire.channel import Channel, Codec, codec_of
from lit_fed.engine.wire.workers import Devices, launch, leave_processes, on_first_process, raise_if_lost
from lit_fed.errors import ConfigError, LitFedError, ProcessLost
from lit_fed.participation import FullParticipation, Participation
from lit_fed.printing import counted, unfailing
from lit_fed.privacy import SecureSum
from lit_fed.protocols import DEFAULT_PROTOCOLS
from lit_fed.tracking import displays
from lit_fed.wings import of_wing

R = TypeVar("R")
Tasks = LightningModule | Mapping[str, LightningModule]


LIGHTNINGS = {
    "max_epochs": "use max_rounds, and local_epochs within a round",
    "min_epochs": "a run has max_rounds rounds, and EarlyStopping of lit_fed.callbacks ends it earlier",
    "max_steps": "use max_rounds, and local_steps within a round",
    "min_steps": "a run has max_rounds rounds, and EarlyStopping of lit_fed.callbacks ends it earlier",
    "limit_val_batches": "use the data's max_test_samples",
    "limit_test_batches": "use the data's max_test_samples",
    "limit_predict_batches": "predict on a smaller file by inputs",
    "overfit_batches": "use the data's max_train_samples",
    "val_check_interval": "use evaluate_every, in rounds",
    "check_val_every_n_epoch": "use evaluate_every, in rounds",
    "num_sanity_val_steps": "a first batch is checked before every run",
    "log_every_n_steps": "a run logs every round",
    "enable_model_summary": "use lit-fed cost, or ModelSummary of Lightning on the model",
    "benchmark": "set torch.backends.cudnn.benchmark",
    "inference_mode": "evaluation runs without gradients",
    "use_distributed_sampler": "use strategy='clients' or 'ddp'",
    "profiler": "use a profiler of torch around fit; metrics.csv has the times of each round",
    "detect_anomaly": "use torch.autograd.set_detect_anomaly",
    "barebones": "use logger=False, enable_checkpointing=False, enable_pictures=False and enable_progress_bar=False",
    "plugins": "use precision and strategy",
    "sync_batchnorm": "use buffers, which averages batch norm's statistics or keeps them with clients",
    "reload_dataloaders_every_n_epochs": "loaders are made for every client and round",
    "model_registry": "use lit-fed export, and upload the folder",
    "enable_autolog_hparams": "use logger, which gets the run's settings",
}
"""Arguments of ``lightning.Trainer`` that a federation does not take, with what takes their place."""


class FederatedTrainer(Checked):
    """Runs the rounds of a federation, evaluates it, and predicts with it.

    Args:
        accelerator: As in Lightning: ``auto``, ``cpu``, ``gpu``, ….
        devices: Number of devices (on CPU: processes), or a list of devices.
        num_nodes: Number of machines, started by ``torchrun`` or SLURM.
        strategy: ``clients`` spreads the clients over the devices (what ``auto`` means on several), ``ddp`` trains
            every client data-parallel on all of them; or a DDP strategy object.
        precision: ``32-true``, ``bf16-mixed``, ``16-mixed``, … as in Lightning.
        max_rounds: Total number of rounds, including those before a resume.
        max_time: Time after which the run ends with the round under way, as ``DD:HH:MM:SS`` or a ``timedelta``,
            including the time before a resume; null for no limit.
        local_epochs: Passes over a client's data per round, also fractions (0.5); 1 if `local_steps` is null, too.
        local_steps: Batches per client and round, instead of epochs.
        limit_train_batches: Most batches of each pass over a client's training data: their number (2), or their share
            (0.5, rounded down, of a client with data at least one); null for all.
        fast_dev_run: A trial of all parts, to find errors: a number of rounds, with one pass over at most as many
            batches of each client, and one evaluation; true for 1. No loggers, no checkpoints, no folder.
        seed: Determines all randomness of the run.
        participation: Draws the cohorts; all clients by default.
        kinds: Kinds of networks by name, each with the model's settings that differ, and its ``clients`` by name (0, 1,
            … for clients without names) or ``client_positions``; clients take the kinds in turn if no kind lists any.
            In Python, pass ``fit`` a model for each name.
        executor: Trains a cohort: ``sequential``, client by client; ``vectorized``, in groups as one computation;
            ``auto``, in groups where that is faster.
        group_size: Clients in a group; null for the number whose weights fit into 96 MiB, or into a share of the free
            memory of the first process's GPU. A resumed run keeps the size.
        callbacks: Listeners before the default ones (progress, record, dashboard, checkpoint). Lightning's callbacks
            watch the clients' local work.
        logger: True for TensorBoard, False for none, or Lightning loggers.
        default_root_dir: Parent folder of ``lightning_logs``; the working directory by default.
        evaluate_every: Rounds between evaluations, which also follow the last round; 0 for never.
        evaluate_on: ``test``, or ``val`` for held-out training data alone. With ``test``, held-out data choose the
            best round and stop early where there are any, by ``val/…``.
        protocols: Evaluations; `GlobalTest` and `ClientTest` by default.
        buffers: Policy for buffers such as batch-norm statistics: ``average``, ``local`` or ``server``.
        on_client_failure: ``raise`` stops the run with the client's id; ``skip`` continues without the update, prints
            each cause once, and stops if no client is left.
        client_timeout: Seconds per client and round, after which the client fails; null for no limit.
        compile: ``true`` compiles the model's networks with ``torch.compile``, ``reduce-overhead`` in this mode of it;
            ``graph`` has clients' forward and backward passes as CUDA graphs, without compiling.
        channels_last: Store clients' batches of images (4 dimensions) in channels-last memory format.
        gradient_clip_val: Threshold for clipping the clients' gradients.
        gradient_clip_algorithm: ``norm`` or ``value``.
        accumulate_grad_batches: Batches per optimizer step.
        schedule_steps: Span of a learning-rate schedule with ``interval: step``: a client's work in one ``round``, anew
            for each client and round, or in the ``run``: in round r it begins at r times the client's steps in a round,
            and ``self.trainer.estimated_stepping_batches`` counts `max_rounds` rounds.
        client_optimizer: ``fresh`` begins every phase of a client's training with a new optimizer. ``kept`` continues
            with the state, such as momentum, Adam's moments and step counts, that the phase of this name left when the
            client last trained; each client keeps its own beside its other state. Learning rates and schedules stay
            those of the round. Tests and fine-tuning begin fresh and leave it alone. Not in groups.
        uplink_codec: Packs the clients' payloads for the wire; of several, each packs what the one before it made.
        downlink_codec: Packs the broadcast for the wire; may be a list, too.
        client_store: Keeps client states between rounds on ``disk``, or also in ``memory``, which is faster and grows
            with the population.
        enable_progress_bar: Show progress on the terminal, that of reading data and of evaluation included.
        enable_checkpointing: Write ``last.ckpt`` and ``best.ckpt``.
        enable_pictures: Draw pictures for loggers, and ``left_out.png``; false saves about half a second a run.
        record: Write ``record.jsonl``, hashes of what each round sent, received and made of it, for ``lit-fed verify``
            (`lit_fed.record.callback.Record`).
        num_threads: CPU threads of each process; null for torch's choice. The order of sums in kernels depends on it:
            set it for bit-identical weights with another number of processes.
        deterministic: Refuse non-deterministic operations on a GPU, or with ``warn`` warn of them.
        privacy: Differential privacy around the method, such as `lit_fed.privacy.ClientLevel`; null for none.
        aggregation: Rule in place of the method's mean, such as `lit_fed.robust.Median`; null for the mean. Not with
            `privacy`.
        attack: Attack on the training by some clients, such as `lit_fed.robust.SignFlip`; null for none.
        secure_sum: Sum updates over nodes so that the server sees no term, see `lit_fed.privacy.SecureSum`; null for
            the method's own mean. Not with `aggregation`; of `privacy` only with `ClientLevel`, of ``uplink_codec``
            only with `lit_fed.codecs.RandomK` with ``common_seed``.

    Raises:
        ConfigError: For settings that contradict each other or cannot work.
    """

    _refused_as = "trainer"
    _not_taken = LIGHTNINGS

    def __init__(
        self,
        accelerator: str = "auto",
        devices: list[int] | int | str = "auto",
        num_nodes: int = 1,
        strategy: str | Strategy = "auto",
        precision: str | int = "32-true",
        max_rounds: int = 100,
        max_time: str | timedelta | None = None,
        local_epochs: float | None = None,
        local_steps: int | None = None,
        limit_train_batches: int | float | None = None,
        fast_dev_run: bool | int = False,
        seed: int = 0,
        participation: Participation | None = None,
        kinds: dict[str, dict] | None = None,  # type: ignore[type-arg]  # of Any, the parser would make objects of them
        executor: ExecutorName = "sequential",
        group_size: int | None = None,
        callbacks: list[Callback | LightningCallback] | None = None,
        logger: bool | Logger | list[Logger] = True,
        default_root_dir: str | None = None,
        evaluate_every: int = 1,
        evaluate_on: EvalSubset = "test",
        protocols: list[Protocol] | None = None,
        buffers: BufferPolicy = "average",
        on_client_failure: OnFailure = "raise",
        client_timeout: float | None = None,
        compile: Compile = False,
        channels_last: bool = False,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        accumulate_grad_batches: int = 1,
        schedule_steps: ScheduleSteps = "round",
        client_optimizer: ClientOptimizer = "fresh",
        uplink_codec: Codec | list[Codec] | None = None,
        downlink_codec: Codec | list[Codec] | None = None,
        client_store: Literal["memory", "disk"] = "disk",
        enable_progress_bar: bool = True,
        enable_checkpointing: bool = True,
        enable_pictures: bool = True,
        record: bool = False,
        num_threads: int | None = None,
        deterministic: bool | Literal["warn"] = False,
        privacy: Privacy | None = None,
        aggregation: Aggregation | None = None,
        attack: Attack | None = None,
        secure_sum: SecureSum | None = None,
    ) -> None:
        wrappers = Wrappers([privacy, aggregation, attack, None if secure_sum is None else secure_sum.wrapper()])
        uplink = codec_of("trainer.uplink_codec", uplink_codec)
        if uplink is not None and not uplink.common_seed:
            wrappers.check_view("uplink_codec", uplink, "payloads")
        given, watchers = lightning_watchers(callbacks or [])
        self._trial: TemporaryDirectory[str] | None = None
        if check_range("trainer.fast_dev_run", fast_dev_run, least=0):
            self._trial = TemporaryDirectory(prefix="lit-fed-", ignore_cleanup_errors=True)
            max_rounds = evaluate_every = limit_train_batches = int(fast_dev_run)
            local_epochs, local_steps, logger, default_root_dir = 1, None, False, self._trial.name
            enable_checkpointing = enable_pictures = False
            given = [one for one in given if not isinstance(one, Checkpoint | EarlyStopping)]
        given += [] if max_time is None else [Timer(max_time)]
        given += [of_wing("record.callback").Record()] if record and self._trial is None else []
        self.devices = Devices(accelerator, devices, num_nodes, strategy, precision, num_threads, deterministic)
        if compile == "graph" and executor != "sequential":
            raise ConfigError(
                f"trainer.compile is graph and trainer.executor is {executor}; set one of them to its default"
            )
        self.local = LocalSettings(
            local_work(local_epochs, local_steps, limit_train_batches),
            GradientOptions(
                gradient_clip_val, gradient_clip_algorithm, accumulate_grad_batches, schedule_steps, client_optimizer
            ),
            NetworkOptions(compile, channels_last),
            buffers,
            watchers,
            executor_maker(executor, group_size),
            Guard(client_timeout),
            wrappers,
        )
        self.settings = RunSettings(
            max_rounds,
            seed,
            evaluate_every,
            evaluate_on,
            [protocol() for protocol in DEFAULT_PROTOCOLS] if protocols is None else protocols,
            on_client_failure,
            Path(default_root_dir or ".") / "lightning_logs",
            logger,
            enable_pictures,
            is_trial=self._trial is not None,
        )
        self.channel = Channel(uplink, codec_of("trainer.downlink_codec", downlink_codec), seed)
        self.participation = participation or FullParticipation()
        self.kinds, self.client_store = kinds, client_store
        self._shows_progress = enable_progress_bar
        self.callbacks = default_callbacks(given, enable_progress_bar, enable_checkpointing)
        self.fabric = self.devices.fabric()
        self._run: Run | None = None
        self._parts: tuple[Any, Any, Any] | None = None
        self._launched = False

    # ------------------------------------------------------------------ what a user calls

    @checked
    def fit(
        self,
        model: Tasks,
        datamodule: FederatedDataModule,
        algorithm: Algorithm[Any],
        ckpt_path: str | None = None,
    ) -> None:
        """Train a federation; a second call with the same parts continues after the last finished round.

        Args:
            model: Any LightningModule, or one for each of ``trainer.kinds`` by name.
            datamodule: The population.
            algorithm: The method.
            ckpt_path: Checkpoint to resume from: ``last`` (of the newest run), a file, or a run folder.
        """
        self._launch(lambda: self._fit(model, datamodule, algorithm, ckpt_path))

    @checked
    def validate(
        self,
        model: Tasks,
        datamodule: FederatedDataModule,
        algorithm: Algorithm[Any],
        ckpt_path: str | None = None,
    ) -> dict[str, float]:
        """Run every protocol on the validation data and print a table.

        Args:
            model: As for `fit`.
            datamodule: The population, with ``val_fraction`` above 0.
            algorithm: The method.
            ckpt_path: ``last``, ``best``, a file or a run folder; None for the model just trained.
        """
        return self._launch(
            lambda: self._evaluate(self._to_read(model, datamodule, algorithm, "validate", ckpt_path), ckpt_path, "val")
        )

    @checked
    def test(
        self,
        model: Tasks,
        datamodule: FederatedDataModule,
        algorithm: Algorithm[Any],
        ckpt_path: str | None = None,
    ) -> dict[str, float]:
        """Run every protocol on the test data and print a table.

        Args:
            model: As for `fit`.
            datamodule: The population.
            algorithm: The method.
            ckpt_path: ``last``, ``best``, a file or a run folder; None for the model just trained.
        """
        return self._launch(
            lambda: self._evaluate(self._to_read(model, datamodule, algorithm, "test", ckpt_path), ckpt_path, "test")
        )

    @checked
    def predict(
        self,
        model: Tasks,
        datamodule: FederatedDataModule,
        algorithm: Algorithm[Any],
        ckpt_path: str | None = None,
        client: str | None = None,
        client_position: int | None = None,
        output: str | None = None,
        inputs: str | None = None,
        overwrite: bool = False,
    ) -> list[Any]:
        """Predict on the shared test set, a client's test data, or inputs of another file.

        Args:
            model: As for `fit`.
            datamodule: The population.
            algorithm: The method.
            ckpt_path: ``last``, ``best``, a file or a run folder; None for the model just trained.
            client: Predict as this client on its own test data: its name, or "0", "1", … for clients without names;
                None for the global model.
            client_position: Predict as the client at this position, counted from 0.
            output: Output file: ``.csv`` (a row per sample), ``.npz`` (an array per output) or, of poses, ``.json``;
                None for none.
            inputs: Predict on a table, ``.npz`` arrays, or images, as the data module reads them.
            overwrite: Replace an existing file.

        Returns:
            The outputs of ``predict_step``, by batch.
        """
        file, source = (None if name is None else Path(name) for name in (output, inputs))

        def work() -> list[Any]:
            if file is not None:
                on_first_process(self.fabric, lambda: check_output(file, overwrite))
            run = self._to_read(model, datamodule, algorithm, "predict", ckpt_path)
            return predict(run, ckpt_path, one_client(run.federation.data, client, client_position), file, source)

        return self._launch(work)

    def describe(self, config: str, told: tuple[str, ...] = ()) -> None:
        """Set the resolved configuration in YAML, which the run's folder keeps, and the keys that the user set."""
        self.settings = replace(self.settings, config=config, given_keys=told)

    @property
    def max_rounds(self) -> int:
        """Total number of rounds; raise it for `fit` to continue with a trained federation."""
        return self.settings.max_rounds

    @max_rounds.setter
    @checked
    def max_rounds(self, max_rounds: int) -> None:
        self.settings = replace(self.settings, max_rounds=max_rounds)

    @property
    def run(self) -> Run:
        """The current or last run; a `ConfigError` before the first."""
        if self._run is None:
            raise ConfigError("this trainer has not run yet; call fit, validate, test or predict")
        return self._run

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last round, by name."""
        return self.run.metrics

    callback_metrics = metrics
    """Metrics of the last round under Lightning's name."""

    @property
    def best_model_path(self) -> str:
        """The file of the best round so far, as of Lightning's ``ModelCheckpoint``; empty if there is none."""
        file = self.run.log_dir / "checkpoints" / "best.ckpt"
        return str(file) if file.is_file() else ""

    @property
    def log_dir(self) -> Path:
        """The run's folder."""
        return self.run.log_dir

    def save_checkpoint(self, path: str | Path) -> None:
        """Write the state after the last finished round; called on every process, written by the first.

        Raises:
            CheckpointError: If it is not finite, or cannot be written; an older file of that name survives.
        """
        check_server(self.run, "this trainer")
        save_checkpoint(self.run, Path(path))

    def _evaluate(self, run: Run, ckpt_path: str | None, subset: EvalSubset) -> dict[str, float]:
        check_protocols(run.settings.protocols, run.federation, subset)
        with loaded(run, ckpt_path) as last_round:
            metrics = evaluate(run, last_round, subset)
            if self.fabric.is_global_zero:
                print_evaluation(metrics, subset, run.next_round, run.origin)
        return metrics

    # ------------------------------------------------------------------ set-up

    def _fit(self, model: Tasks, data: FederatedDataModule, algorithm: Algorithm[Any], ckpt_path: str | None) -> None:
        run = self.assemble(model, data, algorithm, "fit")
        if self.settings.is_trial:
            self.fabric.print(
                f"trainer.fast_dev_run: {counted(run.max_rounds, 'round')}, at most {run.max_rounds} of each client's "
                "batches, one evaluation, no logger and no checkpoint; nothing is kept"
            )
        if run.settings.evaluate_every:
            check_protocols(run.settings.protocols, run.federation, run.settings.evaluate_on)
            check_monitors(run)
        self.local.wrappers.prepare(run.next_round > 0 or ckpt_path is not None)
        with self.local.guard.on_duty(run.workers.data_parallel), open_run(run, ckpt_path):
            if run.start_round >= run.max_rounds:
                self.fabric.print(f"all {run.start_round} rounds are done; raise trainer.max_rounds to continue")
            self.local.wrappers.begin(run.settings.max_rounds)
            with run.federation.session.at_work("fit"):
                run_rounds(run)
                for kind, trained in run.federation.global_models(max(run.next_round - 1, 0)).items():
                    run.federation.loops[kind].model.load(trained)  # the caller's task

    def _to_read(
        self, model: Tasks, data: FederatedDataModule, algorithm: Algorithm[Any], stage: TaskStage, ckpt: str | None
    ) -> Run:
        """The run that evaluates or predicts; without a checkpoint, the parts must be the trained objects."""
        if ckpt is None and self._parts is not None and self.run.next_round:
            given = {"model": model, "datamodule": data, "algorithm": algorithm}
            if odd := [key for (key, part), known in zip(given.items(), self._parts, strict=True) if part != known]:
                raise ConfigError(
                    f"{odd[0]} is not the object that this trainer trained with; pass the same one, or give ckpt_path"
                )
        return self.assemble(model, data, algorithm, stage)

    def _launch(self, function: Callable[[], R]) -> R:
        displays[:] = [] if self._shows_progress else [str]
        atexit.unregister(leave_processes)  # an unexpected error may leave this process in a collective: exit at once
        try:
            with unfailing():
                if self._launched:
                    result: R = function()
                else:
                    # A forking strategy ends its processes with the function; other strategies keep the processes for
                    # the next call.
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
        """Check the parts, set them up for a stage, and join them to a run, without training."""
        if self._run is not None and self._parts == (model, data, algorithm):
            self._run.settings = self.settings
            for loop in self._run.federation.loops.values():
                loop.trainer.max_epochs = self.settings.max_rounds
            return self._run
        self.devices.settle_arithmetic()
        tasks = dict(model) if isinstance(model, Mapping) else {ONLY: model}
        parts = RunParts(tasks, self.kinds_of(tasks), data, algorithm, self.participation)
        store = ClientStore(self.client_store)
        federation = assemble(self.fabric, parts, self.local, self.settings, self.channel, store, stage)
        for loop in federation.loops.values():
            loop.trainer.loggers = [DummyLogger()] if self.settings.logger else []  # until the run opens its loggers
        folder = None if self._run is None else self._run.folder
        self._run = Run(federation, self.settings, self.callbacks, folder=folder)
        for task in tasks.values():
            self._run.names.declare(task)
        self._parts = (model, data, algorithm)
        return self._run

    def kinds_of(self, model: Tasks) -> Kinds:
        """The model of each client.

        Raises:
            ConfigError: If the models do not match ``trainer.kinds``.
        """
        return assign(model if isinstance(model, Mapping) else {ONLY: model}, self.kinds)
