"""A run on the terminal: a live bar or one line per round, and a closing table."""

from __future__ import annotations

import fnmatch
import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from lit_fed.callbacks.early_stopping import check_reported
from lit_fed.engine.lightning.metric_names import ON_VALIDATION, base_name
from lit_fed.engine.loop.run import Callback, RoundRecord, Run
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.file_names import shown
from lit_fed.participation import Fate, Participant
from lit_fed.printing import counted
from lit_fed.tracking import displays

_PLAIN_WIDTH = 100  # without a terminal, such as in a log file
_REFRESH_HZ = 10.0
PROTOCOLS = {
    "global": "the global model on the shared {data} set",
    "clients": "each client's model on its own {data} data, before fine-tuning",
    "clients_global": "each client's model on the shared {data} set",
    "local": "each client's model as its own work left it, on its own {data} data",
    "personal": "each client's model on its own {data} data, after local fine-tuning",
    "unseen": "the model that clients never sampled would receive, on their own {data} data",
}
"""Meaning of the protocols' metrics, by prefix."""
_KIND = "global_"  # with several kinds of network, the prefix of a kind's global model is this and the kind's name


def protocol_of(name: str) -> str | None:
    """The key in `PROTOCOLS` of a metric's protocol, which for ``global_<kind>/acc`` is ``global``, or None."""
    prefix = name.partition("/")[0]
    if prefix in PROTOCOLS:
        return prefix
    return "global" if prefix.startswith(_KIND) else None


def meaning_of(name: str, data: str) -> str:
    """The meaning of a metric's protocol, with the kind of network if the metric is of one kind.

    Args:
        name: A metric's full name, or its prefix, for which `protocol_of` has a protocol.
        data: The data's name, such as ``test``.
    """
    protocol, prefix = protocol_of(name), name.partition("/")[0]
    assert protocol is not None, f"{name} has no protocol"
    text = PROTOCOLS[protocol].format(data=data)
    return text if prefix == protocol else f"{text}, for kind {prefix.removeprefix(_KIND)!r}"


def is_evaluated(name: str) -> bool:
    """Whether a metric is a global model's, a mean over clients, or the training loss."""
    protocol = protocol_of(name)
    return protocol == "global" or (protocol is not None and name.endswith("_mean")) or name == "train/loss"


_EPSILON, _ACCURACY = "privacy/epsilon", "global/acc"


def format_bytes(count: float) -> str:
    """A number of bytes with a decimal unit: ``1.2 MB``."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(count) < 999.5 or unit == "PB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


@dataclass(slots=True)
class _Best:
    """The newest value of one metric, and its value in the best round, by itself or by another metric."""

    last: float
    best: float = math.nan
    best_round: int = -1
    by: str = ""
    guide: float = math.nan  # the best value of ``by``

    def add(self, value: float, round_idx: int, by: str, guide: float, lower: bool) -> None:
        if by != self.by:
            self.by, self.guide = by, math.nan
        self.last = value
        improves = guide < self.guide if lower else guide > self.guide
        if math.isfinite(guide) and (improves or not math.isfinite(self.guide)):
            self.best, self.best_round, self.guide = value, round_idx, guide


class Progress(Callback):
    """Shows a run on the terminal.

    On a terminal: one live display with a bar over rounds and one over this process's clients. Elsewhere: one line a
    round. At the end: a table of metrics with their last and best values, over the rounds before a resume too, and the
    paths of the written files. Where validation data choose, the best value of a test metric is its value in the round
    of the best ``val/…``.

    Args:
        metrics: The rows of the closing table: names or patterns such as ``clients/*_min``; null takes the global
            model's metrics, the means over clients and the training loss.

    Raises:
        ConfigError: At the first evaluation, if a name or pattern fits none of the round's metrics.
    """

    monitor = "auto"

    def __init__(self, metrics: list[str] | None = None) -> None:
        self.metrics = metrics
        self.console: Console | None = None  # set it to write to another stream than standard output
        self._live: Live | None = None
        self._bests: dict[str, _Best] = {}
        self._total_bytes = 0.0
        self._started = 0.0
        self._first_round = self._max_rounds = self._round_idx = self._rounds_done = 0
        self._clients_done = self._clients_total = 0
        self._doing = ""
        self._latest: dict[str, float] = {}
        self._monitor: str | None = None

    # ------------------------------------------------------------------ hooks

    def on_fit_start(self, run: Run) -> None:
        """Note the first round; the display opens with that round, after everything that can be refused."""
        self._started = time.perf_counter()
        self._first_round = self._round_idx = self._rounds_done = run.start_round
        self._max_rounds, self._monitor = run.max_rounds, run.names.monitor
        if not run.start_round:
            self._bests, self._total_bytes, self._latest = {}, 0.0, {}

    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        """Restart the bar over clients."""
        self._round_idx = round_idx
        if not run.fabric.is_global_zero:
            return
        self._clients_done, self._clients_total, self._doing = 0, _count_own(run, plan), "training"
        console = self._get_console()
        if self._live is None and console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                console=console, get_renderable=self._render, refresh_per_second=_REFRESH_HZ, transient=True
            )
            self._live.start()
            displays.append(lambda words: setattr(self, "_doing", words))

    def on_client_end(self, run: Run, update: ClientUpdate) -> None:
        """Count the client; the display reads the count ten times a second."""
        self._clients_done += 1

    def on_evaluation_start(self, run: Run, round_idx: int) -> None:
        """Show that evaluation has started."""
        self._doing = "evaluating…"

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Update the best values, and print a line where there is no live display."""
        metrics, round_idx = record.metrics, record.round_idx
        self._monitor, choice = run.names.monitor, run.names.choice
        for pattern in self.metrics or ():
            if not fnmatch.filter(self._bests, pattern) and not fnmatch.filter(metrics, pattern):
                check_reported("Progress.metrics", pattern, run, record)
        for name, value in metrics.items():
            if not self._has_row(name, choice):
                continue
            entry = self._bests.setdefault(name, _Best(value))
            by = (entry.by or name) if choice is None else name  # not known yet: as before a resume
            if choice is not None and choice.startswith(ON_VALIDATION) and not name.startswith("train/"):
                by = choice
            entry.add(value, round_idx, by, metrics.get(by, math.nan), run.names.direction(by) == "min")
        self._total_bytes += metrics.get("comm/total_bytes", 0.0)
        self._latest |= metrics
        self._rounds_done = round_idx + 1
        if run.fabric.is_global_zero and self._live is None:
            self._print(_round_line(round_idx, metrics, self._monitor))

    def _has_row(self, name: str, choice: str | None) -> bool:
        if self.metrics is None:
            return is_evaluated(name) or name in (_EPSILON, choice)
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.metrics)

    def on_fit_end(self, run: Run) -> None:
        """Close the display and print the closing table."""
        self._stop()
        if run.fabric.is_global_zero:
            self._summarise(run)

    def _summarise(self, run: Run) -> None:
        if self._bests:
            self._get_console().print(self._closing_table())
        if not run.withholds:
            rounds = counted(self._rounds_done, "round")
            self._print(f"{format_bytes(self._total_bytes)} sent up and down in {rounds}")
        for line in [*run.federation.wrappers.closing_lines(), *self._stuck_lines(run)]:
            self._print(line)
        if run.settings.is_trial:
            return
        self._print(f"logs        {shown(run.log_dir)}")
        if any(isinstance(logger, TensorBoardLogger) for logger in run.loggers):
            watch = f"tensorboard --logdir {shlex.quote(shown(run.log_dir))}"
            self._print(f"watch       {watch}  # http://localhost:6006/#custom_scalars")
        for name in ("last", "best"):
            file = _checkpoint(run.log_dir, name)
            if file.is_file():
                self._print(f"{name + '.ckpt':<11} {shown(file)}")

    def _stuck_lines(self, run: Run) -> Iterator[str]:
        """A line on an accuracy that never left the share of the largest class; the labels are read only then."""
        entry, data, subset = self._bests.get(_ACCURACY), run.federation.data, run.settings.evaluate_on
        targets = getattr(next(iter(run.federation.loops.values())).model.task, "targets", None)
        if entry is None or entry.last != entry.best or not callable(targets) or not data.num_classes:
            return
        counts = np.zeros(data.num_classes)
        for batch in data.test_loader() if subset == "test" else data.val_loader():
            labels = targets(batch).cpu().flatten().numpy()
            known = (labels >= 0) & (labels < len(counts))  # a loss may leave others out, such as −100
            counts += np.bincount(labels[known].astype(np.int64), minlength=len(counts))
        if counts.any() and math.isclose(entry.last, share := counts.max() / counts.sum(), rel_tol=1e-6):
            yield (
                f"{_ACCURACY} is {share:.6g} in the last and in the best round, the share of the largest class in the "
                f"{subset} data; look at model.metrics such as balanced_accuracy, and at model.class_weights"
            )

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Restore the terminal; after Ctrl+C, print the closing table and how to continue."""
        self._stop()
        if not run.fabric.is_global_zero or not isinstance(error, KeyboardInterrupt):
            return
        if self._rounds_done:
            self._summarise(run)
        last = _checkpoint(run.log_dir, "last")
        further = f"continue with --ckpt_path {shlex.quote(shown(last))}"
        further = further if last.is_file() else "there is no checkpoint to continue from"
        self._print(f"interrupted in round {self._round_idx}; {further}")

    def state_dict(self) -> dict[str, Any]:
        """The last and best values, and the bytes sent."""
        bests = {name: list(astuple(entry)) for name, entry in self._bests.items()}
        return {"bests": bests, "total_bytes": self._total_bytes}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._bests = {name: _Best(*entry) for name, entry in state["bests"].items()}
        self._total_bytes = state["total_bytes"]
        self._latest = {name: entry.last for name, entry in self._bests.items()}

    # ------------------------------------------------------------------ display

    def _get_console(self) -> Console:
        # Made late: a console holds locks, which cannot be sent to another process.
        if self.console is None:
            self.console = plain_console()
        return self.console

    def _print(self, line: str) -> None:
        say(self._get_console(), line)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            displays.clear()

    def _render(self) -> RenderableType:
        done, total, elapsed = self._rounds_done, self._max_rounds, time.perf_counter() - self._started
        parts = [f"{done}/{total}", f"{clock(elapsed)} elapsed"]
        if done > self._first_round:
            parts.append(f"{clock(elapsed / (done - self._first_round) * (total - done))} left")
        width = 30 if self._get_console().width >= _PLAIN_WIDTH else 16
        # Label and bar keep their width: a narrow terminal cuts the text.
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(width=7, no_wrap=True)
        grid.add_column(width=width, no_wrap=True)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        grid.add_row("rounds", ProgressBar(max(total, 1), done, width=width), Text(" · ".join(parts)))
        clients = f"{self._clients_done}/{self._clients_total} · round {self._round_idx} · {self._doing}"
        grid.add_row("clients", ProgressBar(max(self._clients_total, 1), self._clients_done, width=width), clients)
        latest = Text(_key_values(self._latest, self._monitor), style="green", no_wrap=True, overflow="ellipsis")
        return Group(grid, latest) if latest else grid

    def _closing_table(self) -> Table:
        by = next((entry.by for entry in self._bests.values() if entry.by.startswith(ON_VALIDATION)), None)
        chosen = "" if by is None else f"; best: the round of the best {by}"
        table = Table(title=f"after {counted(self._rounds_done, 'round')}{chosen}", title_justify="left")
        table.add_column("metric", overflow="fold")
        for heading in ("last", "best", "best in round"):
            table.add_column(heading, justify="right", overflow="fold")
        for name in _sorted_names(self._bests):
            entry = self._bests[name]
            has_best = math.isfinite(entry.best) and name != _EPSILON
            shown = (f"{entry.best:.6g}", str(entry.best_round)) if has_best else ("–", "–")
            table.add_row(Text(name), f"{entry.last:.6g}", *shown)  # Text, because a name's brackets are not markup
        return table


def print_evaluation(
    metrics: Mapping[str, float], subset: str, rounds: int, origin: str, console: Console | None = None
) -> None:
    """Print the table of ``validate`` and ``test``: a row per metric, and the meaning of each protocol.

    Args:
        metrics: Values by full name, such as ``global/acc``.
        subset: ``val`` or ``test``.
        rounds: Rounds of the model's training.
        origin: Source of the model.
        console: Console to print to; the standard output by default.
    """
    console = console or plain_console()
    data = {"val": "validation"}.get(subset, subset)
    if not metrics:
        console.print(f"nothing was evaluated on the {data} data: no protocol applies", soft_wrap=True)
        return
    table = Table(title=f"{data} data, after {counted(rounds, 'round')}", title_justify="left")
    table.add_column("metric", overflow="fold")
    table.add_column("value", justify="right", overflow="fold")
    group = ""
    for name in _sorted_names(metrics):
        prefix = name.partition("/")[0]
        if group and prefix != group:
            table.add_section()
        group = prefix
        table.add_row(Text(name), f"{metrics[name]:.6g}")
    console.print(table)
    say(console, f"{'model':<10} {origin}")
    for prefix in dict.fromkeys(name.partition("/")[0] for name in _sorted_names(metrics)):
        if protocol_of(prefix):
            say(console, f"{prefix + '/':<10} {meaning_of(prefix, data)}")


def plain_console(width: int = _PLAIN_WIDTH) -> Console:
    """A console on standard output; without a terminal, of a given width."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def say(console: Console, line: str) -> None:
    """Print a line without wrapping, so that paths can be copied and logs searched."""
    console.print(line, soft_wrap=True, markup=False, highlight=False)


def _checkpoint(log_dir: Path, name: str) -> Path:
    return Path(log_dir) / "checkpoints" / f"{name}.ckpt"


def _count_own(run: Run, plan: Sequence[Participant]) -> int:
    """The number of a round's clients that train on this process."""
    working = [participant.client_id for participant in plan if participant.fate is not Fate.LOST_BEFORE]
    return len(run.workers.share(working, run.federation.data.census.num_samples))


def _sorted_names(names: Mapping[str, Any]) -> list[str]:
    """Names by protocol, in the order of `PROTOCOLS`, others last; within one as measured."""
    order = list(PROTOCOLS)
    prefixes = list(dict.fromkeys(name.partition("/")[0] for name in names))
    prefixes.sort(key=lambda prefix: order.index(protocol) if (protocol := protocol_of(prefix)) else len(order))
    return [name for prefix in prefixes for name in names if name.partition("/")[0] == prefix]


def _key_names(metrics: Iterable[str], monitor: str | None) -> list[str]:
    """The metrics of a line: the monitored one by every protocol and kind of network, and the losses."""
    if monitor is None:
        return ["train/loss", _EPSILON]
    key = base_name(monitor)
    kinds = [name for name in metrics if name.startswith(_KIND) and name.endswith(f"/{key}")]
    over_clients = [f"{protocol}/{key}_mean" for protocol in PROTOCOLS if protocol != "global"]
    return list(dict.fromkeys([f"global/{key}", "global/loss", *kinds, *over_clients, "train/loss", _EPSILON]))


def _key_values(metrics: Mapping[str, float], monitor: str | None) -> str:
    return " ".join(f"{name} {metrics[name]:.3g}" for name in _key_names(metrics, monitor) if name in metrics)


_COST: dict[str, Callable[[float], str]] = {
    "participation/count": lambda count: counted(int(count), "client"),
    "comm/total_bytes": format_bytes,
    "time/round_s": lambda seconds: f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s",
    "clock/virtual_s": "clock {:.4g} s".format,
    "staleness/mean": "staleness {:.2g}".format,
    "staleness/max": "(max {:.0f})".format,
}


def _round_line(round_idx: int, metrics: Mapping[str, float], monitor: str | None) -> str:
    cost = " ".join(words(metrics[name]) for name, words in _COST.items() if name in metrics)
    return " | ".join(part for part in (f"round {round_idx}", _key_values(metrics, monitor), cost) if part)


def clock(seconds: float) -> str:
    """A duration as hours, minutes and seconds."""
    return str(timedelta(seconds=round(max(0.0, seconds))))
