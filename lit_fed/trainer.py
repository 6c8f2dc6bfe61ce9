"""The round loop: a plain class that owns Fabric and runs a federation."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning.fabric.strategies.strategy import Strategy
from lightning.pytorch.loggers import Logger

from lit_fed.algorithm import Algorithm
from lit_fed.callbacks import Callback, Checkpoint, RoundRecord, default_callbacks
from lit_fed.checkpoint import restore, snapshot
from lit_fed.client import BufferPolicy, ClientModule
from lit_fed.errors import ClientFailure, ConfigError
from lit_fed.federation import Federation, assemble
from lit_fed.inference import evaluate, predict
from lit_fed.local import GradientOptions
from lit_fed.metrics.ledger import RoundLedger
from lit_fed.participation import Fate, FullParticipation, Participant, Participation
from lit_fed.payload import Channel, ClientUpdate, Codec, Payload, is_finite
from lit_fed.protocols import ClientTest, EvalSplit, Evaluation, GlobalTest, Protocol, check_protocols, run_protocols
from lit_fed.reducers import Reducer
from lit_fed.runs import open_run
from lit_fed.store import ClientStore, write_atomically
from lit_fed.strategy import Workers, build_fabric, leave_processes, on_first_process

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule

R = TypeVar("R")


@dataclass(slots=True)
class Round:
    """One round under way on this process.

    Args:
        round_idx: The round, counted from 0.
        plan: Who was selected, and what becomes of their work.
        broadcast: What the clients receive.
        reducer: Takes in what arrives.
        ledger: Takes down what happens.
        started: When, by the process's clock.
    """

    round_idx: int
    plan: Sequence[Participant]
    broadcast: Payload
    reducer: Reducer[Any]
    ledger: RoundLedger
    started: float

    def close(self, workers: Workers) -> RoundLedger:
        """The ledger of all processes, once every one of them has run its clients."""
        self.ledger.local_s = time.perf_counter() - self.started
        self.ledger.merge(workers)
        return self.ledger


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
        seed: All randomness of the run follows from it.
        participation: Who takes part in a round; everybody by default.
        callbacks: Listeners, before the default ones (progress, record, dashboard, checkpoint).
        logger: True for TensorBoard, False for none, or Lightning loggers.
        default_root_dir: Where ``lightning_logs`` is made; the working directory by default.
        evaluate_every: Run the protocols every so many rounds and after the last; 0 for never.
        evaluate_on: ``test``, or ``val`` to choose rounds and stop early on held-out training data.
        protocols: What to evaluate; `GlobalTest` and `ClientTest` by default.
        buffers: Policy for buffers such as batch-norm statistics: ``average``, ``local`` or ``server``.
        on_client_failure: ``raise`` stops the run with the client's id, ``skip`` goes on without its update.
        compile: Compile the module's networks with ``torch.compile``.
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
        seed: int = 0,
        participation: Participation | None = None,
        callbacks: list[Callback] | None = None,
        logger: bool | Logger | list[Logger] = True,
        default_root_dir: str | None = None,
        evaluate_every: int = 1,
        evaluate_on: Literal["test", "val"] = "test",
        protocols: list[Protocol] | None = None,
        buffers: BufferPolicy = "average",
        on_client_failure: Literal["raise", "skip"] = "raise",
        compile: bool = False,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        accumulate_grad_batches: int = 1,
        uplink_codec: Codec | None = None,
        downlink_codec: Codec | None = None,
        client_store: Literal["memory", "disk"] = "disk",
        enable_progress_bar: bool = True,
        enable_checkpointing: bool = True,
        num_threads: int | None = None,
    ) -> None:
        for key, value, least in (
            ("max_rounds", max_rounds, 1),
            ("evaluate_every", evaluate_every, 0),
            ("accumulate_grad_batches", accumulate_grad_batches, 1),
            ("num_threads", 1 if num_threads is None else num_threads, 1),
        ):
            if value < least:
                raise ConfigError(f"trainer.{key} is {value}; it must be at least {least}")
        if gradient_clip_val is not None and gradient_clip_val <= 0:
            raise ConfigError(
                f"trainer.gradient_clip_val is {gradient_clip_val}; it must be positive, or null for none"
            )
        self.fabric = build_fabric(accelerator, devices, num_nodes, strategy, precision)
        self.max_rounds = max_rounds
        self.seed = seed
        self.participation = participation or FullParticipation()
        self.evaluate_every = evaluate_every
        self.evaluate_on: EvalSplit = evaluate_on
        self.protocols = [GlobalTest(), ClientTest()] if protocols is None else protocols
        self.buffers: BufferPolicy = buffers
        self.on_client_failure = on_client_failure
        self.compile = compile
        self.num_threads = num_threads
        self.gradients = GradientOptions(gradient_clip_val, gradient_clip_algorithm, accumulate_grad_batches)
        self.channel = Channel(uplink_codec, downlink_codec)
        self.client_store: Literal["memory", "disk"] = client_store
        self.store = ClientStore(client_store)
        self.callbacks = default_callbacks(callbacks or [], enable_progress_bar, enable_checkpointing)
        self.keeps_checkpoints = any(isinstance(callback, Checkpoint) for callback in self.callbacks)
        self.default_root_dir = Path(default_root_dir or ".")
        self.logger_choice = logger

        self.federation: Federation | None = None
        self.loggers: list[Logger] = []
        self.log_dir: Path | None = None
        self.resumed_from: Path | None = None
        self.start_round = 0
        self.next_round = 0
        self.should_stop = False
        self.config = ""  # the resolved configuration as YAML, where the command line started the run
        self.metrics: dict[str, float] = {}
        self._launched = False
        self._listeners: dict[str, list[Callable[..., None]]] = {}

    # ------------------------------------------------------------------ what a user calls

    def fit(
        self,
        model: ClientModule,
        datamodule: FederatedDataModule,
        algorithm: Algorithm[Any],
        ckpt_path: str | None = None,
    ) -> None:
        """Train a federation.

        Called again with the same parts, it goes on after the last finished round.

        Args:
            model: The clients' half.
            datamodule: The population.
            algorithm: The server's half.
            ckpt_path: Resume from here: ``last`` (of the newest run), a checkpoint file, or a run folder.
        """
        self._launch(lambda: self._fit(model, datamodule, algorithm, ckpt_path))

    def validate(
        self,
        model: ClientModule,
        datamodule: FederatedDataModule,
        algorithm: Algorithm[Any],
        ckpt_path: str | None = None,
    ) -> dict[str, float]:
        """Run every protocol on the validation data and print a table.

        Args:
            model: The clients' half.
            datamodule: The population, with ``val_fraction`` above 0.
            algorithm: The server's half.
            ckpt_path: ``last``, ``best``, a file or a run folder; None for the model just trained.
        """
        return self._launch(lambda: evaluate(self, self._assemble(model, datamodule, algorithm), ckpt_path, "val"))

    def test(
        self,
        model: ClientModule,
        datamodule: FederatedDataModule,
        algorithm: Algorithm[Any],
        ckpt_path: str | None = None,
    ) -> dict[str, float]:
        """Run every protocol on the test data and print a table.

        Args:
            model: The clients' half.
            datamodule: The population.
            algorithm: The server's half.
            ckpt_path: ``last``, ``best``, a file or a run folder; None for the model just trained.
        """
        return self._launch(lambda: evaluate(self, self._assemble(model, datamodule, algorithm), ckpt_path, "test"))

    def predict(
        self,
        model: ClientModule,
        datamodule: FederatedDataModule,
        algorithm: Algorithm[Any],
        ckpt_path: str | None = None,
        client_id: int | None = None,
        output: str = "predictions.csv",
    ) -> Path:
        """Write predictions on the shared test set, or on one client's own, to a file.

        Args:
            model: The clients' half.
            datamodule: The population.
            algorithm: The server's half.
            ckpt_path: ``last``, ``best``, a file or a run folder; None for the model just trained.
            client_id: Predict as this client, on its own test data; None for the global model on the shared set.
            output: File to write: ``.csv`` (one row a sample) or ``.npz`` (one array per output).
        """
        return self._launch(
            lambda: predict(self, self._assemble(model, datamodule, algorithm), ckpt_path, client_id, Path(output))
        )

    # ------------------------------------------------------------------ the loop

    def _fit(
        self, model: ClientModule, data: FederatedDataModule, algorithm: Algorithm[Any], ckpt_path: str | None
    ) -> None:
        federation = self._assemble(model, data, algorithm)
        if self.evaluate_every:
            check_protocols(self.protocols, federation, self.evaluate_on)
        open_run(self, ckpt_path)
        if self.start_round >= self.max_rounds:
            self.fabric.print(f"all {self.start_round} rounds are done already; raise trainer.max_rounds to go on")
        self._call("on_fit_start")
        try:
            for round_idx in range(self.start_round, self.max_rounds):
                if self.should_stop:
                    break
                self._run_round(federation, round_idx)
        except BaseException as error:
            self._call("on_exception", error)
            raise
        model.load_tensors(algorithm.global_state())  # what the caller holds is the trained global model
        self._call("on_fit_end")

    def _run_round(self, federation: Federation, round_idx: int) -> None:
        algorithm, workers = federation.algorithm, federation.workers
        current = self._begin_round(federation, round_idx)
        self._add_late_updates(federation, current)
        self._run_clients(federation, current)
        ledger = current.close(workers)
        if ledger.failures and self.on_client_failure == "raise":
            raise ledger.failures[0]

        reduced = time.perf_counter()
        aggregate = current.reducer.result(workers)
        metrics = {}
        if aggregate is not None:
            metrics = algorithm.step(aggregate, round_idx, len(ledger.delivered))
        federation.store.commit(workers, round_idx + 1)
        metrics = ledger.metrics(federation.data.num_samples, workers) | metrics
        metrics |= {"time/local_s": ledger.local_s, "time/aggregate_s": time.perf_counter() - reduced}
        self._end_round(federation, current, metrics)

    def _begin_round(self, federation: Federation, round_idx: int) -> Round:
        plan = federation.participation.plan(round_idx)
        started = time.perf_counter()
        self._call("on_round_start", round_idx, plan)
        federation.module.prepare_round(round_idx)
        federation.module.load_tensors(federation.algorithm.global_state())
        broadcast, downlink_bytes = federation.channel.down(federation.algorithm.broadcast(round_idx))
        return Round(round_idx, plan, broadcast, federation.algorithm.reducer(), RoundLedger(downlink_bytes), started)

    def _run_clients(self, federation: Federation, current: Round) -> None:
        fates = {participant.client_id: participant.fate for participant in current.plan}
        working = [client_id for client_id, fate in fates.items() if fate is not Fate.LOST_BEFORE]
        workers, num_samples = federation.workers, federation.data.num_samples
        for client_id in workers.share(list(fates), num_samples):
            current.ledger.sent(client_id)  # whoever drops out has downloaded before
        share = workers.share(working, num_samples)
        for update in federation.executor.run(share, current.broadcast, current.round_idx):
            if isinstance(update, ClientFailure):
                current.ledger.failed(update)
                if self.on_client_failure == "raise":
                    return  # the other processes learn of it when the ledgers merge
                continue
            current.ledger.trained(update, current.broadcast)
            self._call("on_client_end", update)
            if fates[update.client_id] is Fate.LATE:
                federation.store.put_update(update)
            elif fates[update.client_id] is Fate.ON_TIME:
                self._deliver(federation, current, update)

    def _add_late_updates(self, federation: Federation, current: Round) -> None:
        late = federation.participation.late(current.round_idx)
        for client_id in federation.workers.share(late, federation.data.num_samples):
            update = federation.store.pop_update(client_id, federation.fabric.device)
            if update is not None:
                self._deliver(federation, current, update)

    def _deliver(self, federation: Federation, current: Round, update: ClientUpdate) -> None:
        update.payload, uplink_bytes = federation.channel.up(update.payload)
        if federation.channel.uplink is not None and not is_finite(update.payload):
            cause = "its update is no longer finite after trainer.uplink_codec; choose one with a wider range"
            current.ledger.failed(ClientFailure(update.client_id, current.round_idx, cause))
            return
        current.reducer.add(update)
        current.ledger.arrived(update.client_id, uplink_bytes)

    def _end_round(self, federation: Federation, current: Round, metrics: dict[str, float]) -> None:
        evaluation, done = Evaluation(), current.round_idx + 1
        if self.evaluate_every and (done == self.max_rounds or done % self.evaluate_every == 0):
            self._call("on_evaluation_start", current.round_idx)
            begun = time.perf_counter()
            evaluation = run_protocols(self.protocols, federation, current.round_idx, self.evaluate_on)
            metrics["time/eval_s"] = time.perf_counter() - begun
        if self.on_client_failure == "skip":
            metrics["participation/failed"] = len(current.ledger.failures)
        metrics["time/round_s"] = time.perf_counter() - current.started
        self.metrics = evaluation.metrics | federation.workers.gather(metrics)[0]  # the first process's clock
        self.next_round = done
        if not self.keeps_checkpoints:
            federation.store.collect_garbage([], delete=self.fabric.is_global_zero)
        rows = current.ledger.rows + evaluation.rows
        self._call("on_round_end", RoundRecord(current.round_idx, self.metrics, rows, current.plan))

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, path: str | Path) -> None:
        """Write the state after the last finished round; called on every process, written by the first.

        Raises:
            CheckpointError: If it cannot be written; an older file of that name is then still there.
        """
        on_first_process(self.fabric, lambda: write_atomically(snapshot(self), Path(path)))

    def load_checkpoint(self, path: str | Path, resume: bool = False) -> None:
        """Take everything from a checkpoint; called on every process.

        Args:
            path: The file.
            resume: Training is to go on, so the clients must still have the same data.

        Raises:
            CheckpointError: If it is corrupt, foreign, or from a run with another model, seed or partition.
        """
        restore(self, Path(path), resume)

    # ------------------------------------------------------------------ set-up

    @property
    def logs(self) -> Path:
        """The folder of all runs."""
        return self.default_root_dir / "lightning_logs"

    def _launch(self, function: Callable[[], R]) -> R:
        atexit.unregister(leave_processes)  # after an error other processes may still wait in a collective: just exit
        if self._launched:
            result: R = function()
        else:
            # A strategy that forks ends its processes with the function; the others keep them for the next call.
            self._launched = getattr(self.fabric.strategy, "_start_method", "popen") == "popen"
            result = self.fabric.launch(lambda _fabric: function())
        atexit.register(leave_processes)
        return result

    def _assemble(self, model: ClientModule, data: FederatedDataModule, algorithm: Algorithm[Any]) -> Federation:
        before = self.federation
        if before is not None and (before.module, before.data, before.algorithm) == (model, data, algorithm):
            return before
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        self.store = ClientStore(self.client_store)
        self.start_round = self.next_round = 0
        self.should_stop, self.metrics = False, {}
        self.federation = assemble(
            self.fabric,
            model,
            data,
            algorithm,
            participation=self.participation,
            gradients=self.gradients,
            channel=self.channel,
            store=self.store,
            buffers=self.buffers,
            compile_network=self.compile,
            seed=self.seed,
        )
        return self.federation

    def _call(self, hook: str, *args: Any) -> None:
        if hook not in self._listeners:  # a hook may run for every client: leave out callbacks that do not use it
            overriding = [c for c in self.callbacks if getattr(type(c), hook) is not getattr(Callback, hook)]
            self._listeners[hook] = [getattr(callback, hook) for callback in overriding]
        for listener in self._listeners[hook]:
            listener(self, *args)
