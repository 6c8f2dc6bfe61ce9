"""What the terminal shows, through a rich console that writes into a string."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from torch import nn

from lit_fed import Classifier
from lit_fed.callbacks import RoundRecord
from lit_fed.callbacks.progress import Progress, format_bytes, is_evaluated, print_evaluation
from lit_fed.data import Arrays, TensorDataModule
from lit_fed.engine.lightning.metric_names import MetricNames
from lit_fed.engine.method.wrapper import Wrappers
from lit_fed.errors import ConfigError
from lit_fed.participation import Fate, Participant
from tests.support import fit

PLAN = [Participant(client_id, Fate.ON_TIME) for client_id in range(4)] + [Participant(9, Fate.LOST_BEFORE)]


def a_run(log_dir: Path = Path("run"), start_round: int = 0, rank_zero: bool = True, **more: Any) -> Any:
    def num_samples(client_id: int) -> int:
        return 1

    settings: dict[str, Any] = {"max_rounds": 3, "loggers": [], "log_dir": log_dir, "names": MetricNames()}
    settings["workers"] = SimpleNamespace(share=lambda clients, num_samples: clients)
    settings["withholds"], settings["settings"] = False, SimpleNamespace(is_trial=False, evaluate_on="test")
    data = SimpleNamespace(census=SimpleNamespace(num_samples=num_samples, has_labels=False))
    loops = {"": SimpleNamespace(model=SimpleNamespace(task=None))}
    settings["federation"] = SimpleNamespace(data=data, wrappers=Wrappers(), server={}, loops=loops)
    fabric = SimpleNamespace(is_global_zero=rank_zero)
    return SimpleNamespace(**({"fabric": fabric, "start_round": start_round} | settings | more))


def a_progress(terminal: bool = False, width: int = 100) -> tuple[Progress, io.StringIO]:
    progress, file = Progress(), io.StringIO()
    progress.console = Console(file=file, width=width, force_terminal=terminal)
    return progress, file


def run_round(progress: Progress, run: Any, round_idx: int, **metrics: float) -> None:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    progress.on_round_start(run, round_idx, PLAN)
    for _ in range(4):
        progress.on_client_end(run, None)  # type: ignore[arg-type]
    progress.on_evaluation_start(run, round_idx)
    run.names.see(named)
    progress.on_round_end(run, RoundRecord(round_idx, named, [], PLAN))


def test_without_a_terminal_a_round_is_one_line_however_narrow() -> None:
    progress, file = a_progress(width=20)
    run = a_run()
    progress.on_fit_start(run)
    costs = {"comm__total_bytes": 1_234_000.0, "time__round_s": 0.84, "participation__count": 5.0}
    values = {"global__acc": 0.9124, "global__loss": 0.31, "clients__acc_mean": 0.88, "clients__acc_std": 0.1}
    run_round(progress, run, 11, train__loss=0.25, **values, **costs)
    assert file.getvalue() == (
        "round 11 | global/acc 0.912 global/loss 0.31 clients/acc_mean 0.88 train/loss 0.25 "
        "| 5 clients 1.23 MB 0.84 s\n"
    )


def test_a_round_without_evaluation_and_a_task_without_accuracy_have_lines_too() -> None:
    progress, file = a_progress()
    run = a_run()
    progress.on_fit_start(run)
    run_round(progress, run, 0, time__round_s=12.4)
    run_round(progress, run, 1, train__loss=0.5, global__rmse=2.0, clients__rmse_mean=2.5)
    assert file.getvalue().splitlines() == [
        "round 0 | 12 s",
        "round 1 | global/rmse 2 clients/rmse_mean 2.5 train/loss 0.5",
    ]


def test_the_line_of_an_asynchronous_round_has_its_clock_and_staleness() -> None:
    progress, file = a_progress()
    run = a_run(Path())
    progress.on_fit_start(run)
    run_round(progress, run, 0, global__acc=0.5, clock__virtual_s=24.375, staleness__mean=1.5, staleness__max=4.0)
    run_round(progress, run, 1, global__acc=0.5, clock__virtual_s=26.0)  # of a round with a deadline
    assert [line.partition(" | ")[2] for line in file.getvalue().splitlines()] == [
        "global/acc 0.5 | clock 24.38 s staleness 1.5 (max 4)",
        "global/acc 0.5 | clock 26 s",
    ]


def test_the_line_and_the_best_follow_what_the_task_says() -> None:
    # The task calls fit the most important, and smaller better; loss it names second.
    names = MetricNames({"fit": "min", "loss": "min"}, declared=True)
    progress, file = a_progress()
    run = a_run(names=names)
    progress.on_fit_start(run)
    for round_idx, value in enumerate((2.0, 1.0, 3.0)):
        values = {"global__loss": 0.5, "global__fit": value, "global__other": 9.0, "clients__fit_mean": 2 * value}
        run_round(progress, run, round_idx, **values)
    assert file.getvalue().splitlines()[1] == "round 1 | global/fit 1 global/loss 0.5 clients/fit_mean 2"
    progress.on_fit_end(run)
    assert re.search(r"global/fit +│ +3 │ +1 │ +1 │", file.getvalue())


def test_a_resumed_run_shows_the_main_metric_from_the_first_line_on() -> None:
    first, _ = a_progress()
    run = a_run()
    first.on_fit_start(run)
    run_round(first, run, 0, global__acc=0.5, train__loss=1.0)
    second, _ = a_progress(terminal=True)
    second.load_state_dict(first.state_dict())
    second.on_fit_start(a_run(start_round=1, names=MetricNames(monitor="global/acc")))
    console = Console(file=io.StringIO(), width=100)
    console.print(second._render())
    assert "global/acc 0.5" in console.file.getvalue()  # type: ignore[attr-defined]


def test_on_a_terminal_bars_over_rounds_and_over_own_clients() -> None:
    progress, file = a_progress(terminal=True)
    run = a_run()
    progress.on_fit_start(run)
    progress.on_round_start(run, 0, PLAN)
    progress.on_client_end(run, None)  # type: ignore[arg-type]
    assert progress._live is not None
    progress._live.refresh()
    assert "1/4 · round 0 · training" in file.getvalue(), "a client that drops out before its work is not waited for"
    progress.on_evaluation_start(run, 0)
    run.names.see({"global/acc": 0.5})
    progress.on_round_end(run, RoundRecord(0, {"global/acc": 0.5}, [], PLAN))
    progress._live.refresh()
    progress.on_fit_end(run)
    shown = file.getvalue()
    assert "evaluating…" in shown
    assert "1/3 ·" in shown
    assert "global/acc 0.5" in shown
    assert "round 0 |" not in shown, "no lines beside the bars"
    assert "sent up and down in 1 round\n" in shown


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_narrow_terminal_keeps_labels_and_counts(width: int) -> None:
    progress, _ = a_progress(terminal=True, width=width)
    progress._latest = {"global/acc": 0.5, "global/loss": 0.25, "clients/acc_mean": 0.125}
    progress._monitor = "global/acc"
    progress._max_rounds, progress._rounds_done, progress._clients_total = 100, 12, 1000
    console = Console(file=io.StringIO(), width=width)
    console.print(progress._render())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 3
    assert lines[0].startswith("rounds ")
    assert "12/100" in lines[0]
    assert "0/1000" in lines[1]


def test_clients_cost_no_rendering() -> None:
    progress, file = a_progress(terminal=True)
    run = a_run()
    progress.on_fit_start(run)
    progress.on_round_start(run, 0, PLAN)
    renders = 0
    assert progress._live is not None
    render = progress._render

    def counted() -> Any:
        nonlocal renders
        renders += 1
        return render()

    progress._live._get_renderable = counted
    before = len(file.getvalue())
    for _ in range(1000):
        progress.on_client_end(run, None)  # type: ignore[arg-type]
    # 1,000 calls take about 0.1 ms, in which the 10 Hz display comes round at most once or twice.
    assert renders <= 4
    assert len(file.getvalue()) - before < 4000
    progress.on_fit_end(run)


def test_closing_table_has_last_and_best_of_every_evaluated_metric(tmp_path: Path) -> None:
    progress, file = a_progress()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    run = a_run(tmp_path, loggers=[TensorBoardLogger(tmp_path)])
    progress.on_fit_start(run)
    accuracies, losses = [0.25, 0.75, 0.5], [3.0, 1.0, 2.0]
    for round_idx in range(3):
        run_round(
            progress,
            run,
            round_idx,
            global__acc=accuracies[round_idx],
            global__loss=losses[round_idx],
            clients__acc_mean=accuracies[round_idx],
            clients__acc_std=0.1,
            comm__total_bytes=1e6,
        )
    progress.on_fit_end(run)
    shown = file.getvalue()
    table = {row[0]: row[1:] for row in re.findall(r"│ (\S+) +│ +(\S+) +│ +(\S+) +│ +(\S+) +│", shown)}
    assert table == {
        "global/acc": ("0.5", "0.75", "1"),
        "global/loss": ("2", "1", "1"),
        "clients/acc_mean": ("0.5", "0.75", "1"),
    }
    unwrapped = shown.splitlines()
    assert "3 MB sent up and down in 3 rounds" in unwrapped
    assert f"logs        {tmp_path}" in unwrapped
    assert f"watch       tensorboard --logdir {tmp_path}  # http://localhost:6006/#custom_scalars" in unwrapped
    assert f"last.ckpt   {tmp_path / 'checkpoints' / 'last.ckpt'}" in unwrapped
    assert "best.ckpt" not in shown


def test_each_kind_s_global_model_has_its_rows_and_its_place_in_the_line() -> None:
    progress, file = a_progress()
    run = a_run()
    progress.on_fit_start(run)
    for round_idx, acc in enumerate((0.25, 0.75, 0.5)):
        run_round(progress, run, round_idx, clients__acc_mean=0.125, global_full__acc=acc, global_half__acc=1 - acc)
    progress.on_fit_end(run)
    shown = file.getvalue()
    assert shown.splitlines()[0] == "round 0 | global_full/acc 0.25 global_half/acc 0.75 clients/acc_mean 0.125"
    table = re.findall(r"│ (\S+) +│ +(\S+) +│ +(\S+) +│ +(\S+) +│", shown)
    assert table == [  # global models first, also where the metrics come in another order
        ("global_full/acc", "0.5", "0.75", "1"),
        ("global_half/acc", "0.5", "0.75", "0"),
        ("clients/acc_mean", "0.125", "0.125", "0"),
    ]


def test_the_rows_of_the_closing_table_are_a_setting() -> None:
    progress, file = a_progress()
    progress.metrics = ["clients/*_min", "global/f1"]
    run = a_run(settings=SimpleNamespace(evaluate_every=2, is_trial=False, evaluate_on="test"))
    progress.on_fit_start(run)
    run_round(progress, run, 0, train__loss=1.0)  # not evaluated
    run_round(progress, run, 1, global__f1=0.5, global__acc=0.6, clients__acc_min=0.2, time__eval_s=1.0)
    progress.on_fit_end(run)
    rows = re.findall(r"│ (\S+) +│ +(\S+) +│", file.getvalue())
    assert rows == [("global/f1", "0.5"), ("clients/acc_min", "0.2")]


def test_a_row_of_the_closing_table_that_no_metric_fits_is_refused_at_the_first_evaluation() -> None:
    progress, _ = a_progress()
    progress.metrics = ["clients/*_worst"]
    run = a_run(settings=SimpleNamespace(evaluate_every=1, is_trial=False))
    progress.on_fit_start(run)
    told = "Progress.metrics is 'clients/*_worst', and no metric of this run is called so; there are"
    with pytest.raises(ConfigError, match=re.escape(told)):
        run_round(progress, run, 0, global__acc=0.5, train__loss=1.0, time__eval_s=1.0)


def test_best_covers_the_rounds_before_a_resume_and_ignores_nan() -> None:
    first, _ = a_progress()
    run = a_run()
    first.on_fit_start(run)
    run_round(first, run, 0, global__acc=0.9, global__loss=float("nan"), comm__total_bytes=5.0)
    state = first.state_dict()

    second, file = a_progress()
    second.load_state_dict(state)
    resumed = a_run(start_round=1)
    second.on_fit_start(resumed)
    run_round(second, resumed, 1, global__acc=0.5, global__loss=2.0, comm__total_bytes=5.0)
    second.on_fit_end(resumed)
    assert second.state_dict() == {
        "bests": {
            "global/acc": [0.5, 0.9, 0, "global/acc", 0.9],
            "global/loss": [2.0, 2.0, 1, "global/loss", 2.0],
        },
        "total_bytes": 10.0,
    }
    assert re.search(r"global/acc +│ +0.5 │ +0.9 │ +0 │", file.getvalue())


def test_a_second_fit_from_scratch_starts_a_new_table() -> None:
    progress, _ = a_progress()
    run = a_run()
    progress.on_fit_start(run)
    run_round(progress, run, 0, global__acc=0.9)
    progress.on_fit_start(run)
    assert progress.state_dict() == {"bests": {}, "total_bytes": 0.0}


@pytest.mark.parametrize("saved", [True, False])
def test_an_interrupt_closes_the_display_and_says_how_to_continue(tmp_path: Path, saved: bool) -> None:
    progress, file = a_progress(terminal=True)
    folder = tmp_path / "a run"
    (folder / "checkpoints").mkdir(parents=True)
    if saved:
        (folder / "checkpoints" / "last.ckpt").touch()
    run = a_run(folder)
    progress.on_fit_start(run)
    run_round(progress, run, 0, global__acc=0.9)
    progress.on_round_start(run, 1, PLAN)
    progress.on_exception(run, KeyboardInterrupt())
    assert progress._live is None
    last = file.getvalue().splitlines()[-1]
    assert "interrupted in round 1" in last
    assert (f"--ckpt_path '{folder}/checkpoints/last.ckpt'" in last) == saved, "quoted, as the folder has a space"


def test_another_error_closes_the_display_silently() -> None:
    progress, file = a_progress(terminal=True)
    run = a_run()
    progress.on_fit_start(run)
    progress.on_round_start(run, 0, PLAN)
    progress.on_exception(run, ValueError("a bug"))
    assert progress._live is None
    assert "interrupted" not in file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_only_the_first_process_shows_anything(tmp_path: Path, terminal: bool) -> None:
    progress, file = a_progress(terminal=terminal)
    run = a_run(tmp_path, rank_zero=False)
    progress.on_fit_start(run)
    run_round(progress, run, 0, global__acc=0.9)
    progress.on_fit_end(run)
    progress.on_exception(run, KeyboardInterrupt())
    assert file.getvalue() == ""


def test_the_bar_counts_this_process_s_share() -> None:
    progress, _ = a_progress()
    run = a_run(workers=SimpleNamespace(share=lambda clients, num_samples: clients[::2]))
    progress.on_fit_start(run)
    progress.on_round_start(run, 0, PLAN)
    assert progress._clients_total == 2


@pytest.mark.parametrize("width", [24, 40, 100])
def test_evaluation_table_never_cuts_a_number(width: int) -> None:
    file = io.StringIO()
    metrics = {"clients/acc_mean": 0.912346, "clients/acc_p10": 1.23457e-07, "global/loss": 123457.0}
    print_evaluation(metrics, "val", 12, "runs/a.ckpt, saved by FedAvg on Net", Console(file=file, width=width))
    shown = file.getvalue()
    assert "…" not in shown
    if width >= 40:
        for text in ("0.912346", "1.23457e-07", "123457", "clients/acc_mean"):
            assert text in shown
    # the global model first; a legend for what is there, and only for that
    assert shown.index("global/") < shown.index("clients/")
    assert "global/    the global model on the shared validation set" in shown
    assert "clients/   each client's model on its own validation data, before fine-tuning" in shown
    assert "personal" not in shown
    assert "model      runs/a.ckpt, saved by FedAvg on Net" in shown


def test_evaluation_table_explains_each_kind_s_global_model() -> None:
    file = io.StringIO()
    metrics = {"clients/acc_mean": 0.5, "global_full/acc": 0.25, "global_half/acc": 0.75, "other_full/acc": 1.0}
    print_evaluation(metrics, "test", 12, "", Console(file=file, width=100))
    lines = file.getvalue().splitlines()
    assert [line for line in lines if line.startswith(("global", "clients", "other"))] == [
        "global_full/ the global model on the shared test set, for kind 'full'",
        "global_half/ the global model on the shared test set, for kind 'half'",
        "clients/   each client's model on its own test data, before fine-tuning",
    ]


def test_evaluation_that_found_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_evaluation({}, "test", 3, "")
    assert "nothing was evaluated" in capsys.readouterr().out


def test_evaluation_table_without_a_terminal_is_100_wide(capsys: pytest.CaptureFixture[str]) -> None:
    print_evaluation({f"global/{'x' * 200}": 1.0}, "test", 1, "")
    assert max(map(len, capsys.readouterr().out.splitlines()[:-1])) == 100


def test_which_metrics_are_evaluated() -> None:
    evaluated = ["global/acc", "global_full/acc", "clients/acc_mean", "train/loss"]
    names = [*evaluated, "clients/acc_p10", "train/kd", "time/round_mean"]
    assert [name for name in names if is_evaluated(name)] == evaluated


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1200, "1.2 kB"), (999_999, "1 MB"), (2.5e9, "2.5 GB"), (4e15, "4 PB")],
)
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


class Mostly(TensorDataModule):
    """Three quarters of each client's samples are of class 1, and inputs say nothing."""

    input_shape, num_classes = (1,), 2

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(num_clients=2, batch_size=4, test_batch_size=3, **kwargs)

    def load_arrays(self) -> Arrays:
        x, y = np.ones((16, 1), np.float32), np.arange(16) % 4 > 0
        return Arrays(x, y.astype(np.int64), x, y.astype(np.int64))


@pytest.mark.parametrize("bias", [[0.0, 9.0], [9.0, 0.0]])
@pytest.mark.parametrize("val", [False, True])
def test_an_accuracy_that_never_left_the_largest_class_is_told_in_a_line(
    tmp_path: Path, bias: list[float], val: bool
) -> None:
    """A network that always says one class, and one that always says the other, which is right for a quarter."""
    layer = nn.Linear(1, 2)
    layer.weight.data.zero_()
    layer.bias.data.copy_(torch.tensor(bias))
    module = Classifier(layer, lambda p: torch.optim.SGD(p, lr=1e-6), num_classes=2)
    progress, file = a_progress()
    where: Any = {"evaluate_on": "val"} if val else {}
    fit(tmp_path, module, Mostly(val_fraction=0.5 if val else 0.0), callbacks=[progress], **where)
    lines = [line for line in file.getvalue().splitlines() if "largest class" in line]
    subset = "val" if val else "test"
    share = [line.split("global/acc is ")[1].split()[0] for line in lines]
    if bias[1] == 0.0:
        assert lines == []
        return
    assert lines == [
        f"global/acc is {share[0]} in the last and in the best round, the share of the largest class in the {subset} "
        "data; look at model.metrics such as balanced_accuracy, and at model.class_weights"
    ]
    assert val or share == ["0.75"]
