"""The round loop: who takes part, what becomes of their work, what happens when a client fails."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed import Client, FederatedTrainer, Phase
from lit_fed.callbacks import Callback, EarlyStopping
from lit_fed.codecs import CastCodec
from lit_fed.engine.loop.run import Run
from lit_fed.errors import CheckpointError, ClientFailure, ConfigError
from lit_fed.load import load_network
from lit_fed.methods import FedAvg
from lit_fed.participation import FullParticipation, Participation, Stragglers, UniformParticipation
from lit_fed.protocols import GlobalTest
from tests.support import (
    ROOT,
    LeastSquares,
    Points,
    Unlucky,
    Wanderer,
    Wandering,
    assert_same,
    fit,
    kept,
    rows,
    trainer,
    weights,
)


class Cohorts(Participation):
    """Cohorts given by the test, round by round."""

    def __init__(self, *cohorts: list[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.cohorts = cohorts

    @property
    def nominal_cohort_size(self) -> int:
        return len(self.cohorts[0])

    def draw(self, round_idx: int) -> Any:
        import numpy as np

        return np.array(self.cohorts[round_idx], dtype=np.int64)


def final(made: Any) -> list[float]:
    return weights(made)["network.weight"][0].tolist()


def test_the_callers_module_ends_as_the_global_model(tmp_path: Path) -> None:
    module = LeastSquares()
    fit(tmp_path, module, max_rounds=1)
    assert module.network.weight.tolist() == [[0.25, 1.5]]


def test_only_the_cohort_trains(tmp_path: Path) -> None:
    # Round 0 client 0 alone: (1, 0). Round 1 client 1 alone: (1, 2).
    assert final(fit(tmp_path, participation=Cohorts([0], [1]))) == [1.0, 2.0]


def test_an_empty_round_leaves_the_model_alone(tmp_path: Path) -> None:
    made = fit(tmp_path, participation=Cohorts([0], [], [1]), max_rounds=3)
    assert final(made) == [1.0, 2.0]
    assert [float(row["participation/count"]) for row in rows(made.log_dir / "metrics.csv")] == [1, 0, 1]


def test_everybody_drops_out(tmp_path: Path) -> None:
    made = fit(tmp_path / "before", participation=FullParticipation(dropout_before=1.0))
    assert final(made) == [0.0, 0.0]
    assert made.metrics["comm/downlink_bytes"] == 16  # two clients fetched 2 float32
    assert not [row for row in rows(made.log_dir / "clients.csv") if row["metric"] == "train/loss"]  # none trained
    made = fit(tmp_path / "after", participation=FullParticipation(dropout_after=1.0))
    assert final(made) == [0.0, 0.0]
    assert made.metrics["comm/downlink_bytes"] == 16  # two clients fetched 2 float32
    assert made.metrics["comm/uplink_bytes"] == 0  # and nothing of theirs arrived


def test_late_updates_count_in_the_next_round(tmp_path: Path) -> None:
    # A speed of 1 (sigma 0) and 0.01 s a sample: client 0 takes 0.01 s, client 1 takes 0.03 s and misses 0.02 s.
    # Round 0: only (1, 0) arrives: w = (1, 0); client 1's (0, 2) waits.
    # Round 1: client 0 trains w₁ = 1 − ½(1 − 2) = 1.5 to (1.5, 0); with the late (0, 2) of weight 3:
    #   ((1.5 + 3·0)/4, (0 + 3·2)/4) = (0.375, 1.5).
    stragglers = Stragglers(deadline=0.02, speed_sigma=0.0, late="next_round")
    made = fit(tmp_path, participation=FullParticipation(stragglers=stragglers))
    assert final(made) == [0.375, 1.5]
    uplink = [float(row["comm/uplink_bytes"]) for row in rows(made.log_dir / "metrics.csv")]
    assert uplink == [8, 16]


def test_late_updates_can_be_lost(tmp_path: Path) -> None:
    stragglers = Stragglers(deadline=0.02, speed_sigma=0.0, late="lost")
    made = fit(tmp_path, participation=FullParticipation(stragglers=stragglers))
    assert final(made) == [1.5, 0.0]


def test_a_failing_client_stops_the_run(tmp_path: Path) -> None:
    class Breaks(LeastSquares):
        """Cannot train on client 1's batches in round 1, the first in which w₂ is not 0."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch[0]) == 3 and self.network.weight[0, 1] != 0:
                raise RuntimeError("out of\n   battery")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ClientFailure, match="client 1 failed in round 1: RuntimeError: out of battery") as failure:
        fit(tmp_path, Breaks(), max_rounds=3)
    assert "training_step" in failure.value.details
    folder = tmp_path / "lightning_logs/version_0"
    assert [row["round"] for row in rows(folder / "metrics.csv")] == ["0"]
    resumed = fit(tmp_path, LeastSquares(), max_rounds=3, ckpt_path="last")
    assert_same(weights(resumed), weights(fit(tmp_path / "whole", max_rounds=3)))


class Diverging(FedAvg):
    """Client 1's loss is NaN in round 1."""

    needs = frozenset({"loss"})

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        broken = (client.id, client.round_idx, client.stage) == (1, 1, "train")
        return {"task": super().objective(client, batch)["task"] * (float("nan") if broken else 1.0)}


def test_nan_is_named_and_never_averaged(tmp_path: Path) -> None:
    with pytest.raises(ClientFailure, match="client 1 failed in round 1: train/loss is not finite"):
        fit(tmp_path, algorithm=Diverging(), max_rounds=3)
    # Tolerated, round 1 is client 0's alone: from (0.25, 1.5) to (1.125, 1.5), see test_fedavg; and it is counted.
    made = fit(tmp_path / "skip", algorithm=Diverging(), on_client_failure="skip")
    assert final(made) == [1.125, 1.5]
    assert [float(row["participation/failed"]) for row in rows(made.log_dir / "metrics.csv")] == [0, 1]


def test_an_unlucky_client_of_many(tmp_path: Path) -> None:
    with pytest.raises(ClientFailure, match="client 7 failed in round 0: OSError: its camera broke"):
        fit(tmp_path, data=Points(num_clients=9), algorithm=Unlucky())


def test_a_client_never_inherits_the_previous_ones_state(tmp_path: Path) -> None:
    # Everybody's counter of rounds must be how often that very client trained, whoever ran before it.
    cohorts = ([0, 1], [1, 2], [2, 0], [3, 1])
    torch.manual_seed(0)
    data = Points(num_clients=4, sizes=(2, 3))
    made = fit(tmp_path, Wanderer(), data, Wandering(), participation=Cohorts(*cohorts), max_rounds=4)
    seen: dict[int, int] = {}
    logged = [row for row in rows(made.log_dir / "clients.csv") if row["metric"] == "train/rounds"]
    assert [(int(row["round"]), int(row["client_id"])) for row in logged] == [
        (round_idx, client) for round_idx, cohort in enumerate(cohorts) for client in sorted(cohort)
    ]
    for row in logged:
        client = int(row["client_id"])
        assert float(row["value"]) == seen.get(client, 0)
        seen[client] = seen.get(client, 0) + 1
    assert {client: float(kept(made, client)["state/rounds"]) for client in range(4)} == seen


def test_codecs_change_what_crosses_and_what_it_costs(tmp_path: Path) -> None:
    made = fit(tmp_path, max_rounds=1, uplink_codec=CastCodec("bfloat16"))
    assert (made.metrics["comm/downlink_bytes"], made.metrics["comm/uplink_bytes"]) == (16, 8)
    assert final(made) == [0.25, 1.5]  # exact in bfloat16


def test_a_codec_that_overflows_is_named_and_nothing_averaged(tmp_path: Path) -> None:
    module = LeastSquares(lr=0.0)
    torch.nn.init.constant_(module.network.weight, 1e6)  # float16 ends at 65,504
    with pytest.raises(ClientFailure, match=r"client 0 failed in round 0: its update is no longer finite after"):
        fit(tmp_path, module, max_rounds=1, uplink_codec=CastCodec("float16"))


class Biased(LeastSquares):
    """f(x) = w·x + b from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Linear(2, 1)
        torch.nn.init.zeros_(self.network.weight)
        torch.nn.init.zeros_(self.network.bias)


class TwoPhases(FedAvg):
    """Trains one parameter of `Biased` in each phase."""

    needs = frozenset({"loss"})

    def phases(self, client: Client) -> list[Any]:
        return [
            Phase("bias", client.train_loader(), epochs=1, trains={"network.bias"}),
            Phase("weight", client.train_loader(), steps=1, trains={"network.weight"}),
        ]

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        return {**super().objective(client, batch), client.phase: torch.ones(())}


def test_phases_train_what_they_name(tmp_path: Path) -> None:
    # One client, target 2: the bias goes 0 → ½·2 = 1; then the weight sees residual 1 − 2 and goes 0 → ½·1 = ½.
    protocols: list[Any] = []
    made = fit(tmp_path, Biased(), Points(1), TwoPhases(), max_rounds=1, protocols=protocols)
    assert weights(made)["network.bias"].tolist() == [1.0]
    assert final(made) == [0.5, 0.0]
    assert {"train/bias", "train/weight"} <= made.metrics.keys()


def test_a_phase_needs_one_length() -> None:
    for lengths in ({}, {"epochs": 1, "steps": 1}):
        with pytest.raises(ConfigError, match="has both epochs and steps, or neither; give one of them"):
            Phase("train", [], **lengths)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_rounds": 0}, r"trainer\.max_rounds is 0; it must be at least 1"),
        ({"evaluate_every": -1}, r"trainer\.evaluate_every is -1"),
        ({"gradient_clip_val": -1.0}, r"trainer\.gradient_clip_val is -1"),
        ({"strategy": "fsdp"}, r"trainer\.strategy is 'fsdp'; it must be 'auto', 'clients' or 'ddp'"),
        ({"executor": "fast"}, r"trainer\.executor is 'fast'; it must be 'sequential', 'vectorized' or 'auto'"),
        ({"buffers": "mean"}, r"trainer\.buffers is 'mean'; it must be 'average', 'local' or 'server'"),
        ({"on_client_failure": "ignore"}, r"trainer\.on_client_failure is 'ignore'; it must be 'raise' or 'skip'"),
        ({"client_store": "cloud"}, r"trainer\.client_store is 'cloud'; it must be 'memory' or 'disk'"),
        ({"evaluate_on": "train"}, r"trainer\.evaluate_on is 'train'; it must be 'val' or 'test'"),
        ({"gradient_clip_algorithm": "l1"}, r"trainer\.gradient_clip_algorithm is 'l1'; it must be 'norm' or 'value'"),
        ({"deterministic": "yes"}, r"trainer\.deterministic is 'yes'; it must be True, False or 'warn'"),
        ({"accumulate_grad_batches": 0}, r"trainer\.accumulate_grad_batches is 0; it must be at least 1"),
        ({"precision": "8"}, "trainer: Precision '8' is invalid"),
        ({"accelerator": "gpu"}, r"trainer\.accelerator is 'gpu'; PyTorch finds no such device on this machine"),
        ({"accelerator": "xpu"}, r"trainer\.accelerator is 'xpu'; it must be one of auto, cpu, cuda, gpu, mps, tpu"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    if settings.get("accelerator") == "gpu" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, **settings)


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model is Linear\(.*\); it must be a LightningModule"):
        fit(tmp_path, torch.nn.Linear(2, 1))
    with pytest.raises(ConfigError, match="give ckpt_path='last'"):
        trainer(tmp_path).test(LeastSquares(), Points(), FedAvg())


def test_evaluation_every_other_round_and_after_the_last(tmp_path: Path) -> None:
    made = fit(tmp_path, max_rounds=5, evaluate_every=2)
    evaluated = [int(row["round"]) for row in rows(made.log_dir / "metrics.csv") if row["global/loss"]]
    assert evaluated == [1, 3, 4]


def test_hooks_come_in_order(tmp_path: Path) -> None:
    calls: list[str] = []

    class Listening(Callback):
        def on_fit_start(self, run: Run) -> None:
            calls.append("fit_start")

        def on_round_start(self, run: Run, round_idx: int, plan: Any) -> None:
            calls.append(f"round_start {round_idx} {[p.client_id for p in plan]}")

        def on_client_end(self, run: Run, update: Any) -> None:
            calls.append(f"client_end {update.client_id}")

        def on_evaluation_start(self, run: Run, round_idx: int) -> None:
            calls.append("evaluation_start")

        def on_round_end(self, run: Run, record: Any) -> None:
            calls.append(f"round_end {record.round_idx}")

        def on_fit_end(self, run: Run) -> None:
            calls.append("fit_end")

    fit(tmp_path, max_rounds=1, callbacks=[Listening()])
    clients = ["client_end 0", "client_end 1"]
    rounds = ["round_start 0 [0, 1]", *clients, "evaluation_start", "round_end 0"]
    assert calls == ["fit_start", *rounds, "fit_end"]


def test_fitting_again_goes_on_where_it_stopped(tmp_path: Path) -> None:
    made, parts = trainer(tmp_path, max_rounds=1), (LeastSquares(), Points(), FedAvg())
    made.fit(*parts)
    made.max_rounds = 2
    made.fit(*parts)
    assert final(made) == [0.46875, 2.4375]  # two rounds, see test_fedavg


@pytest.mark.parametrize("writes", [True, False])
def test_what_lies_between_two_fits_does_not_change_the_second(tmp_path: Path, writes: bool) -> None:
    """Tests, validations, predictions and a load of an earlier round, with clients' states and callbacks."""

    def parts() -> tuple[Any, ...]:
        torch.manual_seed(0)
        return Wanderer(), Points(sizes=(4, 6), val_fraction=0.4), Wandering()

    earlier = fit(tmp_path / "earlier", *parts(), max_rounds=1).log_dir / "checkpoints" / "last.ckpt"
    made = {
        name: trainer(tmp_path / name, max_rounds=2, enable_checkpointing=writes, callbacks=[EarlyStopping(patience=9)])
        for name in ("straight", "between")
    }
    mine = {name: parts() for name in made}
    for name, one in made.items():
        one.fit(*mine[name])
    between = made["between"]
    metrics, origin, tested = dict(between.metrics), between.run.origin, between.test(*mine["between"])
    for path in [str(earlier), *(["best", "last"] if writes else [])]:
        found = between.test(*mine["between"], ckpt_path=path)
        assert path != str(earlier) or found != tested
        between.validate(*mine["between"], ckpt_path=path)
        output = str(tmp_path / "predictions.csv")
        between.predict(*mine["between"], path, client_position=1, output=output, overwrite=True)
    with pytest.raises(CheckpointError):
        between.test(*mine["between"], ckpt_path=str(tmp_path / "none.ckpt"))
    load_network(earlier, Wanderer().network)
    assert (between.metrics, between.run.origin) == (metrics, origin)
    assert between.test(*mine["between"]) == tested
    for name, one in made.items():
        one.max_rounds = 4
        one.fit(*mine[name])
    assert between.log_dir == tmp_path / "between" / "lightning_logs" / "version_0"
    assert_same(weights(made["straight"]), weights(between))
    for client_id in (0, 1):
        assert_same(kept(made["straight"], client_id), kept(between, client_id))
    tables = [(one.log_dir / "metrics.csv").read_text() for one in made.values()]
    columns = [[line.split(",time/")[0].split(",")[:8] for line in table.splitlines()] for table in tables]
    assert columns[0] == columns[1]
    assert len(columns[0]) == 5


def test_fitting_a_second_federation_with_the_same_trainer(tmp_path: Path) -> None:
    made = trainer(tmp_path, protocols=[GlobalTest()], participation=UniformParticipation(count=1))
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        made.fit(Wanderer(), Points(4, sizes=(2, 3)), Wandering())
        found.append(weights(made))
    assert_same(*found)
    assert sorted(run.name for run in (tmp_path / "lightning_logs").iterdir()) == ["version_0", "version_1"]


def test_the_state_of_a_run_is_one_object(tmp_path: Path) -> None:
    """Whoever listens is handed it, and it alone: how far the run is, what the last round gave, a flag to stop it."""
    seen: list[Any] = []

    class Stopping(Callback):
        def on_fit_start(self, run: Run) -> None:
            seen.append((type(run), run.start_round, run.next_round, run.metrics, run.max_rounds))

        def on_client_end(self, run: Run, update: Any) -> None:
            seen.append((run.next_round, update.client_id))

        def on_round_end(self, run: Run, record: Any) -> None:
            seen.append(
                (run.next_round, run.metrics == record.metrics, run.log_dir == tmp_path / "lightning_logs/version_0")
            )
            run.should_stop = record.round_idx == 1

    made = fit(tmp_path, max_rounds=9, callbacks=[Stopping()])
    assert seen[0] == (Run, 0, 0, {}, 9)
    assert seen[1:] == [(0, 0), (0, 1), (1, True, True), (1, 0), (1, 1), (2, True, True)]
    assert (made.run.next_round, made.metrics is made.run.metrics) == (2, True)
    assert final(made) == [0.46875, 2.4375]  # two rounds, see test_fedavg


def test_nothing_has_been_run_yet(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    for name in ("run", "metrics", "log_dir"):
        with pytest.raises(ConfigError, match="has not run yet; call fit, validate, test or predict"):
            getattr(made, name)


def test_no_listener_reaches_into_the_trainer() -> None:
    """A listener may be handed a run that no trainer of this process has begun."""
    rooms = [ROOT / "lit_fed" / room for room in ("callbacks", "engine")]
    files = [path for room in rooms for path in room.rglob("*.py")]
    assert len(files) > 20
    imports = [
        path.name for path in files if re.search(r"(from|import) lit_fed[.]trainer|FederatedTrainer", path.read_text())
    ]
    assert imports == []


def test_last_and_best_are_of_the_trainers_own_run_and_a_foreign_checkpoint_gets_a_new_folder(tmp_path: Path) -> None:
    """Two trainers in one folder: the older one's ``best`` is its own; a fit after a foreign test stays in it."""
    first, second = trainer(tmp_path, max_rounds=2), trainer(tmp_path, max_rounds=1)
    mine, theirs = (LeastSquares(), Points(), FedAvg()), (LeastSquares(lr=0.25), Points(), FedAvg())
    first.fit(*mine)
    second.fit(*theirs)
    kept = {made: (made.log_dir, (made.log_dir / "metrics.csv").read_bytes()) for made in (first, second)}
    assert first.log_dir != second.log_dir
    for name in ("best", "last"):
        assert first.test(*mine, ckpt_path=name) == first.test(
            *mine, ckpt_path=str(kept[first][0] / "checkpoints" / f"{name}.ckpt")
        )
    first.test(*mine, ckpt_path="last")
    first.fit(*mine)  # its own last checkpoint: nothing is left to do, in its own folder
    assert first.log_dir == kept[first][0]
    first.test(*mine, ckpt_path=str(kept[second][0] / "checkpoints" / "last.ckpt"))
    first.max_rounds = 3
    first.fit(*mine)
    assert first.log_dir == kept[first][0]
    assert [row["round"] for row in rows(first.log_dir / "metrics.csv")] == ["0", "1", "2"]
    assert (kept[second][0] / "metrics.csv").read_bytes() == kept[second][1]
    new = trainer(tmp_path, max_rounds=3)
    new.test(*mine, ckpt_path=str(first.log_dir / "checkpoints" / "best.ckpt"))
    new.fit(*mine)  # it has not trained before: it goes on from what it has tested, in a folder of its own
    assert new.log_dir not in (first.log_dir, second.log_dir)
    bare = trainer(tmp_path, max_rounds=1, evaluate_every=0)
    bare.fit(*theirs)
    with pytest.raises(CheckpointError, match=r"lacks a best\.ckpt; name a checkpoint file"):
        bare.test(*theirs, ckpt_path="best")


@pytest.mark.parametrize("url", ["s3://bucket/runs", "file:///tmp/runs", "gs:/bucket"])
def test_a_url_is_no_folder_of_runs(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.default_root_dir is '.*name a local folder"):
        FederatedTrainer(default_root_dir=url)
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_skips_every_batch_is_told_so(tmp_path: Path) -> None:
    class Skips(LeastSquares):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.warns(UserWarning, match="`training_step` returned `None`") as caught:
        made = fit(tmp_path, Skips(), max_rounds=2)
    assert sum("returned `None`" in str(one.message) for one in caught) == 1
    assert weights(made)["network.weight"].tolist() == [[0.0, 0.0]]


def test_metrics_and_the_best_file_have_lightnings_names(tmp_path: Path) -> None:
    # The loss ½(w·x − y)² of the global model on x = (1, 0), y = 2 and thrice x = (0, 1), y = 4. After round 0,
    # w = (0.25, 1.5): (½ · 1.75² + 3 · ½ · 2.5²) / 4 = 2.7265625.
    made = trainer(tmp_path, max_rounds=1)
    parts = (LeastSquares(), Points(), FedAvg())
    made.fit(*parts)
    assert made.callback_metrics == made.metrics
    assert made.callback_metrics["global/loss"] == 2.7265625
    assert made.best_model_path == str(tmp_path / "lightning_logs/version_0/checkpoints/best.ckpt")
    before = made.metrics["global/loss"]
    made.max_rounds = 3
    made.fit(*parts)
    assert made.callback_metrics["global/loss"] < before
    metrics = [float(row["global/loss"]) for row in rows(made.log_dir / "metrics.csv")]
    best = LeastSquares.load_from_checkpoint(made.best_model_path, weights_only=False).network.weight[0].tolist()
    loss = (0.5 * (best[0] - 2) ** 2 + 3 * 0.5 * (best[1] - 4) ** 2) / 4
    assert loss == pytest.approx(min(metrics), rel=1e-6)


def test_without_checkpoints_there_is_no_best_file(tmp_path: Path) -> None:
    assert fit(tmp_path, max_rounds=1, enable_checkpointing=False).best_model_path == ""
