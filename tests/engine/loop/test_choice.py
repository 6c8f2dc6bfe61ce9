"""What chooses a round: validation data where there are any, else the test set, which is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor

from lit_fed.callbacks import Callback, Checkpoint, EarlyStopping, RoundRecord
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, LocalOnly
from lit_fed.protocols import ClientTest, GlobalTest, PersonalTest
from tests.federation.support import deploy, simulate, small
from tests.privacy.support import private, uniform
from tests.support import LeastSquares, Points, assert_same, fit, rows, trainer, weights

TEST_CHOSE = "the test set chooses the best round, by "


class TwoViews(LeastSquares):
    """The test loss falls in every round; the validation loss rises after round 1, the second one.

    On `halves` both clients pull their weight a quarter of the way in a round (learning rate ½, half of the mean):
    w = (2, 4)·(1 − ¾ʳ) after r rounds, with the sums 1.5, 2.625, 3.47, 4.1, …, of which the second is closest to 3.
    """

    metrics: ClassVar = {"loss": "min"}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", (sum(one.sum() for one in self.parameters()) - 3) ** 2)  # of clients and server alike


SUMS = [6 * (1 - 0.75**r) for r in range(1, 7)]
VALIDATION = [(total - 3) ** 2 for total in SUMS]
BEST = 1
assert min(VALIDATION) == VALIDATION[BEST]


def halves(**kwargs: Any) -> Points:
    return Points(sizes=(4, 4), **({"val_fraction": 0.5} | kwargs))


def run(folder: Path, **kwargs: Any) -> Any:
    return fit(folder, TwoViews(), halves(), **({"max_rounds": 5} | kwargs))


def best_round(made: Any) -> int:
    found: int = read_checkpoint(made.log_dir / "checkpoints" / "best.ckpt")["round_idx"] - 1
    return found


def column(made: Any, name: str) -> list[float]:
    return [float(row[name]) for row in rows(made.log_dir / "metrics.csv")]


def rows_of_tests(made: Any) -> list[dict[str, str]]:
    return [row for row in rows(made.log_dir / "clients.csv") if row["stage"] != "train"]


# ---------------------------------------------------------------------- validation data choose


def test_the_best_file_is_the_best_validation_rounds_and_test_metrics_stay(tmp_path: Path, capsys: Any) -> None:
    made = run(tmp_path)
    assert best_round(made) == BEST
    assert column(made, "val/global/loss") == pytest.approx(VALIDATION[:5])
    tested = column(made, "global/loss")
    assert tested == sorted(tested, reverse=True), "by the test set the last round would be the best"
    assert made.run.names.choice == "val/global/loss"
    assert TEST_CHOSE not in capsys.readouterr().out


def test_early_stopping_waits_on_validation_data(tmp_path: Path) -> None:
    made = run(tmp_path, max_rounds=6, callbacks=[EarlyStopping(patience=2)])
    assert made.run.next_round == BEST + 1 + 2


def test_the_table_shows_the_test_metrics_of_the_best_validation_round(tmp_path: Path, capsys: Any) -> None:
    made = run(tmp_path, enable_progress_bar=True, enable_checkpointing=False)
    out = capsys.readouterr().out
    assert "after 5 rounds; best: the round of the best val/global/loss" in out
    for name in ("global/loss", "clients/loss_mean", "val/global/loss"):
        last, best = column(made, name)[-1], column(made, name)[BEST]
        assert re.search(rf"│ {name} +│ +{last:.6g} │ +{best:.6g} │ +{BEST} │", out), name
    assert re.search(r"│ train/loss .* 4 │", out), "training data choose nothing of the others"


def test_a_choice_costs_the_protocols_that_may_choose_and_changes_no_bit(tmp_path: Path) -> None:
    """Training, test metrics and clients' rows are those of a run without a choice."""
    protocols = [GlobalTest(), ClientTest(), PersonalTest()]
    for how in ("sequential", "vectorized"):
        settings: dict[str, Any] = {"executor": how, "protocols": protocols}
        chosen = run(tmp_path / f"{how}_chosen", **settings)
        plain = run(tmp_path / f"{how}_plain", **settings, enable_checkpointing=False)
        assert_same(weights(chosen), weights(plain))
        statistics = ("mean", "std", "p10", "min", "worst", "worst10", "weighted")
        more = {"val/global/loss", *(f"val/clients/loss_{word}" for word in statistics)}
        for mine, theirs in zip(*(rows(one.log_dir / "metrics.csv") for one in (chosen, plain)), strict=True):
            assert mine.keys() - theirs.keys() == more
            assert not theirs.keys() - mine.keys()
            assert all(mine[name] == theirs[name] for name in theirs if not name.startswith("time/"))
        assert rows_of_tests(chosen) == rows_of_tests(plain)


def test_clients_tests_in_groups_are_the_same_where_their_validation_cannot_be_grouped(tmp_path: Path) -> None:
    """A validation step that groups cannot run leaves the test to the groups, to the bit."""

    class ReadsAValue(TwoViews):
        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            self.log("val_loss", float(self.loss(batch)))

    def alone(folder: str, **kwargs: Any) -> Any:
        return fit(
            tmp_path / folder, ReadsAValue(), halves(num_clients=16), LocalOnly(), executor="vectorized", **kwargs
        )

    chosen, plain = alone("chosen"), alone("plain", enable_checkpointing=False)
    assert chosen.run.names.choice == "val/clients/loss_mean", "there is no global model"
    assert rows_of_tests(chosen) == rows_of_tests(plain)
    (own,) = chosen.run.federation.executor.own.values()
    assert own._impossible == {("clients", "val")}


def test_groups_choose_what_clients_one_by_one_choose(tmp_path: Path) -> None:
    alone, grouped = (run(tmp_path / how, executor=how) for how in ("sequential", "vectorized"))
    assert best_round(alone) == best_round(grouped) == BEST
    assert column(alone, "val/global/loss") == pytest.approx(column(grouped, "val/global/loss"))


def test_a_resumed_run_goes_on_with_the_same_choice(tmp_path: Path, capsys: Any) -> None:
    whole = run(tmp_path / "whole", callbacks=[EarlyStopping(patience=2)])
    assert whole.run.next_round == 4
    run(tmp_path / "cut", max_rounds=3, callbacks=[EarlyStopping(patience=2)])
    resumed = run(tmp_path / "cut", callbacks=[EarlyStopping(patience=2)], ckpt_path="last")
    assert (resumed.run.start_round, resumed.run.next_round) == (3, 4)
    assert best_round(resumed) == best_round(whole) == BEST
    assert "begins anew" not in capsys.readouterr().out


def test_a_run_killed_after_its_best_round_keeps_it(tmp_path: Path) -> None:
    class Dies(Callback):
        def on_round_start(self, run: Any, round_idx: int, plan: Any) -> None:
            if round_idx == BEST + 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, callbacks=[Dies()])
    assert best_round(run(tmp_path, ckpt_path="last")) == BEST


def test_another_monitor_after_a_resume_begins_anew_and_says_so(tmp_path: Path, capsys: Any) -> None:
    by_test = Checkpoint(monitor="global/loss")
    run(tmp_path, max_rounds=3, callbacks=[by_test, EarlyStopping(monitor="global/loss", patience=9)])
    capsys.readouterr()
    made = run(tmp_path, callbacks=[EarlyStopping(patience=9)], ckpt_path="last")
    assert best_round(made) == 3, "rounds 3 and 4 are compared; the validation loss rises"
    said = capsys.readouterr().out
    assert "best.ckpt was chosen by global/loss so far; val/global/loss begins anew" in said
    assert "EarlyStopping was chosen by global/loss so far; val/global/loss begins anew" in said


def test_a_federation_chooses_on_its_nodes(tmp_path: Path, capsys: Any) -> None:
    """The server has no validation data; the clients have, and are asked on both sets."""
    make = small(TwoViews, halves, max_rounds=4)
    for own in ({}, {"report": "aggregate", "report_least": 1}):
        made = deploy(make, tmp_path / str(len(own)), [[0, 1]], own=own)
        assert made.run.names.choice == "val/clients/loss_mean"
        assert best_round(made) == BEST
        assert column(made, "val/clients/loss_mean") == pytest.approx(VALIDATION[:4])
        simulated = simulate(make, tmp_path / f"simulated_{len(own)}")
        assert column(made, "clients/loss_mean") == column(simulated, "clients/loss_mean")
        assert_same(weights(made), weights(simulated))
    assert TEST_CHOSE not in capsys.readouterr().out


# ---------------------------------------------------------------------- the test set chooses, and it is said


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(TEST_CHOSE)]


def test_without_validation_data_a_line_says_that_the_test_set_chose(tmp_path: Path, capsys: Any) -> None:
    made = run(tmp_path, callbacks=[EarlyStopping(patience=9)], enable_progress_bar=True)
    assert said(capsys) == []
    made = fit(tmp_path / "none", TwoViews(), halves(val_fraction=0.0), enable_progress_bar=True)
    (line,) = said(capsys)
    why = "there are no validation data; set data.init_args.val_fraction above 0"
    assert line == f"{TEST_CHOSE}global/loss: {why}"
    assert best_round(made) == 1
    assert "val/global/loss" not in made.metrics


def test_a_monitor_on_the_test_set_is_kept_and_said(tmp_path: Path, capsys: Any) -> None:
    made = run(tmp_path, callbacks=[Checkpoint(monitor="global/loss")])
    assert best_round(made) == 4
    assert said(capsys) == [f"{TEST_CHOSE}global/loss: a monitor names it, and val/global/loss is on validation data"]
    made = run(tmp_path / "train", callbacks=[Checkpoint(monitor="train/loss")])
    assert said(capsys) == []
    assert "val/global/loss" not in made.metrics, "nothing chooses by it"


def test_a_monitor_on_validation_data_has_its_protocol_evaluated(tmp_path: Path, capsys: Any) -> None:
    made = run(tmp_path, callbacks=[Checkpoint(monitor="val/clients/loss_mean")])
    assert best_round(made) == BEST
    assert {name for name in made.metrics if name.startswith("val/")} >= {"val/clients/loss_mean"}
    assert said(capsys) == []
    with pytest.raises(ConfigError, match=r"Checkpoint\.monitor is 'val/unseen/loss_mean', and no metric of this run"):
        run(tmp_path, callbacks=[Checkpoint(monitor="val/unseen/loss_mean")])
    with pytest.raises(ConfigError, match=r"Checkpoint\.monitor is 'val/global/loss', and there are no validation"):
        fit(tmp_path, callbacks=[Checkpoint(monitor="val/global/loss")])


def test_where_validation_reports_nothing_the_test_set_chooses(tmp_path: Path, capsys: Any) -> None:
    class Silent(LeastSquares):
        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            pass

    made = fit(tmp_path, Silent(), halves())
    assert best_round(made) == 1
    assert said(capsys) == [f"{TEST_CHOSE}global/loss: no protocol has a metric on validation data"]
    deploy(small(TwoViews, halves, protocols=[GlobalTest()]), tmp_path / "deployed", [[0, 1]])
    assert said(capsys) == [f"{TEST_CHOSE}global/loss: no protocol has a metric on validation data"]


def test_metrics_that_are_on_validation_data_already_are_not_measured_twice(tmp_path: Path, capsys: Any) -> None:
    made = run(tmp_path, evaluate_on="val")
    assert best_round(made) == BEST
    assert made.run.names.choice == "global/loss"
    assert not [name for name in made.metrics if name.startswith("val/")]
    assert said(capsys) == []


@pytest.mark.parametrize("withhold", [True, False])
def test_nothing_private_chooses_without_a_word(tmp_path: Path, capsys: Any, withhold: bool) -> None:
    def trained(folder: str, **kwargs: Any) -> Any:
        kwargs |= private(1.0, 0.5, withhold=withhold)
        return fit(tmp_path / folder, TwoViews(), halves(), uniform(), **kwargs)

    made = trained("default")
    assert made.run.names.choice == "global/loss"
    assert not [name for name in made.metrics if name.startswith("val/")]
    out = capsys.readouterr().out
    assert f"{TEST_CHOSE}global/loss: under trainer.privacy the validation data are the clients' own" in out
    trained("clients", protocols=[ClientTest()])
    out = capsys.readouterr().out
    tells = "clients/loss_mean tells of clients' own data and chooses the best round, which ε does not count"
    assert (tells in out) is not withhold
    assert ("there is no best.ckpt" in out) is withhold


def test_a_listener_of_ones_own_chooses_by_its_monitor(tmp_path: Path) -> None:
    class Own(Callback):
        monitor = "auto"
        seen: ClassVar[list[float]] = []

        def on_round_end(self, run: Any, record: RoundRecord) -> None:
            self.seen.append(record.metrics[run.names.choice])

    made = trainer(tmp_path, callbacks=[Own()], enable_checkpointing=False)
    made.fit(TwoViews(), halves(), FedAvg())
    assert Own.seen == pytest.approx(VALIDATION[:2])
