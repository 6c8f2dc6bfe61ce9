"""Whose model on whose data: every protocol's numbers by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from lit_fed import Client
from lit_fed.callbacks import Callback
from lit_fed.engine.evaluation.protocols import Evaluation, Protocol
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, LocalOnly
from lit_fed.participation import UniformParticipation
from lit_fed.protocols import ClientGlobalTest, ClientTest, GlobalTest, LocalTest, PersonalTest, UnseenTest
from tests.support import (
    LeastSquares,
    Points,
    Threes,
    Wanderer,
    Wandering,
    assert_same,
    client_states,
    fit,
    kept,
    rows,
    trainer,
    weights,
)

# After one round of `Points` and `LeastSquares` w = (1/4, 3/2), see test_fedavg.py. Client 0 wants w₁ = 2, client 1
# wants w₂ = 4, and a step with learning rate ½ halves the distance.
AFTER_ONE = (0.25, 1.5)


class Validated(LeastSquares):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))


def loss(w: float, y: float) -> float:
    return 0.5 * (w - y) ** 2


class Promising(LeastSquares):
    metrics: ClassVar = {"acc": "max", "loss": "min"}


class Boasting(LeastSquares):
    metrics: ClassVar = {"acc": "max", "f1": "max", "loss": "min"}


class Mute(LeastSquares):
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        pass


@pytest.mark.parametrize(
    ("task", "algorithm", "lines"),
    [
        (LeastSquares, FedAvg, []),
        (LeastSquares, LocalOnly, ["there are no metrics global/…: LocalOnly has no global model"]),
        (
            Wanderer,
            Wandering,
            ["there are no metrics global/…: under Wandering a part of every model is personal"],
        ),
        (Promising, FedAvg, ["the model declares a metric acc, and no evaluation reports it"]),
        (Boasting, FedAvg, ["the model declares 2 metrics that no evaluation reports: acc, f1"]),
        (
            Mute,
            FedAvg,
            [
                f"there are no metrics {name}/…: the model logged nothing on the test data"
                for name in ("global", "clients")
            ],
        ),
    ],
)
def test_metrics_that_are_waited_for_in_vain_are_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: Any, algorithm: Any, lines: list[str]
) -> None:
    def told() -> list[str]:
        out = capsys.readouterr().out.splitlines()
        return [line for line in out if line.startswith(("there are no metrics", "the model declares"))]

    data = Threes(2)
    fit(tmp_path, task(), data, algorithm(), max_rounds=3)
    assert told() == lines
    trainer(tmp_path).test(task(), data, algorithm(), ckpt_path="last")
    assert told() == lines


def test_global_and_clients(tmp_path: Path) -> None:
    made = fit(tmp_path, max_rounds=1, protocols=[GlobalTest(), ClientTest()])
    one, two = loss(AFTER_ONE[0], 2), loss(AFTER_ONE[1], 4)
    assert made.metrics["global/loss"] == pytest.approx((one + 3 * two) / 4)  # over samples
    assert made.metrics["clients/loss_mean"] == pytest.approx((one + two) / 2)  # over clients
    found = [
        (r["client_id"], r["metric"], float(r["value"]))
        for r in rows(made.log_dir / "clients.csv")
        if r["stage"] == "test"
    ]
    assert found == [("0", "loss", pytest.approx(one)), ("1", "loss", pytest.approx(two))]


class Scaled(Points):
    """Evaluated with x as it is, doubled and as nothing."""

    def views(self) -> dict[str, Any]:
        return {"double": lambda batch: (2 * batch[0], batch[1]), "nothing": lambda batch: (0 * batch[0], batch[1])}


def test_the_global_model_through_every_view_of_the_data(tmp_path: Path) -> None:
    made = fit(tmp_path, data=Scaled(), max_rounds=1, protocols=[GlobalTest()])
    (row,) = rows(made.log_dir / "metrics.csv")
    again = made.test(LeastSquares(), Scaled(), FedAvg(), "last")
    # Doubled, the outputs are ½ and 3; of nothing they are 0.
    for name, outputs in (("loss", AFTER_ONE), ("loss_double", (0.5, 3.0)), ("loss_nothing", (0.0, 0.0))):
        expected = (loss(outputs[0], 2) + 3 * loss(outputs[1], 4)) / 4
        assert float(row[f"global/{name}"]) == pytest.approx(expected)
        assert again[f"global/{name}"] == pytest.approx(expected)
    assert [name for name in row if name.startswith("global/")] == [
        "global/loss",
        "global/loss_double",
        "global/loss_nothing",
    ]
    assert made.run.names.direction("global/loss_double") == "min"
    assert made.run.names.monitor == "global/loss"


@pytest.mark.parametrize(("epochs", "lr", "left"), [(1, None, 0.5), (2, None, 0.25), (1, 1.0, 0.0), (3, 0.25, 0.75**3)])
def test_personal(tmp_path: Path, epochs: int, lr: float | None, left: float) -> None:
    # Each step leaves the part 1 − lr of the distance: ½ of it with the model's own ½.
    made = fit(tmp_path, max_rounds=1, protocols=[PersonalTest(epochs=epochs, lr=lr)])
    one, two = 0.5 * (1.75 * left) ** 2, 0.5 * (2.5 * left) ** 2
    assert made.metrics["personal/loss_mean"] == pytest.approx((one + two) / 2)
    assert made.metrics["personal/loss_min"] == pytest.approx(min(one, two))
    assert weights(made)["network.weight"].tolist() == [list(AFTER_ONE)]


def test_personal_test_changes_nothing_that_follows(tmp_path: Path) -> None:
    found = []
    for protocols in ([GlobalTest()], [PersonalTest(epochs=2, lr=0.3), GlobalTest()]):
        torch.manual_seed(0)
        made = fit(tmp_path, Wanderer(lr=0.05), Threes(4), Wandering(), max_rounds=3, protocols=protocols)
        states = client_states(made.log_dir)
        table = [
            {n: v for n, v in r.items() if not n.startswith(("time", "personal"))}
            for r in rows(made.log_dir / "metrics.csv")
        ]
        found.append((weights(made), states, table))
    (one, one_states, one_table), (two, two_states, two_table) = found
    assert_same(one, two)
    assert one_table == two_table
    assert one_states.keys() == two_states.keys()
    for name in one_states:
        assert_same(one_states[name], two_states[name])


def test_personal_test_starts_from_the_clients_own_state(tmp_path: Path) -> None:
    starts = []

    class Watching(Wandering):
        def start(self, client: Client) -> dict[str, Tensor]:
            begun = super().start(client)
            if client.stage == "personal":
                starts.append((client.id, begun["network.3.weight"].clone(), float(client.state["rounds"])))
            return begun

    made = fit(tmp_path, Wanderer(lr=0.05), Threes(2), Watching(), max_rounds=1, protocols=[PersonalTest()])
    assert [(client_id, rounds) for client_id, _, rounds in starts] == [(0, 1.0), (1, 1.0)]
    for client_id, head, _ in starts:
        assert torch.equal(head, kept(made, client_id)["network.3.weight"])


def test_unseen_clients_by_hand(tmp_path: Path) -> None:
    made = fit(
        tmp_path,
        data=Points(6),
        max_rounds=1,
        participation=UniformParticipation(count=3, unseen_fraction=0.5),
        protocols=[UnseenTest(), ClientTest()],
    )
    seen = made.run.federation.participation.seen_clients.tolist()
    unseen = made.run.federation.participation.unseen_clients.tolist()
    assert sorted(seen + unseen) == list(range(6))
    # All three seen clients train from 0: an even one (1 sample) to (1, 0), an odd one (3 samples) to (0, 2).
    even, odd = sum(k % 2 == 0 for k in seen), 3 * sum(k % 2 for k in seen)
    w = (even / (even + odd), 2 * odd / (even + odd))
    expected = {k: loss(w[k % 2], (2, 4)[k % 2]) for k in range(6)}
    assert made.metrics["unseen/loss_mean"] == pytest.approx(sum(expected[k] for k in unseen) / 3)
    table = rows(made.log_dir / "clients.csv")
    for stage, clients in (("unseen", unseen), ("test", seen)):
        found = {int(r["client_id"]): float(r["value"]) for r in table if r["stage"] == stage}
        assert found == pytest.approx({k: expected[k] for k in clients})


def test_unseen_clients_never_train(tmp_path: Path) -> None:
    participation = UniformParticipation(count=2, unseen_fraction=0.4)
    made = fit(tmp_path, data=Points(10), max_rounds=12, participation=participation, protocols=[UnseenTest()])
    table = rows(made.log_dir / "clients.csv")
    trained = {int(r["client_id"]) for r in table if r["stage"] == "train"}
    tested = {int(r["client_id"]) for r in table if r["stage"] == "unseen"}
    assert tested == set(participation.unseen_clients.tolist())
    assert len(tested) == 4
    assert trained == set(participation.seen_clients.tolist())  # in twelve rounds everybody's turn came


def test_unseen_test_needs_unseen_clients(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"UnseenTest needs unseen clients; set participation\.unseen_fraction"):
        fit(tmp_path, protocols=[UnseenTest()])
    assert not (tmp_path / "lightning_logs").exists()


def test_max_clients_is_a_fixed_choice(tmp_path: Path) -> None:
    def chosen(folder: str, **kwargs: Any) -> list[list[int]]:
        made = fit(tmp_path / folder, data=Points(20), max_rounds=2, protocols=[ClientTest(max_clients=5)], **kwargs)
        table = [r for r in rows(made.log_dir / "clients.csv") if r["stage"] == "test"]
        return [[int(r["client_id"]) for r in table if r["round"] == round_idx] for round_idx in "01"]

    first, second = chosen("a")
    assert first == second == sorted(set(first))
    assert len(first) == 5
    assert chosen("b", seed=1)[0] != first
    everybody = fit(tmp_path / "c", max_rounds=1, protocols=[ClientTest(max_clients=2)])
    assert everybody.metrics["clients/loss_min"] == loss(0.25, 2)


def test_max_clients_of_seen_clients_only(tmp_path: Path) -> None:
    participation = UniformParticipation(count=2, unseen_fraction=0.5)
    made = fit(tmp_path, data=Points(8), participation=participation, protocols=[ClientTest(max_clients=3)])
    tested = {int(r["client_id"]) for r in rows(made.log_dir / "clients.csv") if r["stage"] == "test"}
    assert len(tested) == 3
    assert tested <= set(participation.seen_clients.tolist())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClientTest(max_clients=0), r"ClientTest\.max_clients is 0; it must be at least 1"),
        (lambda: UnseenTest(max_clients=-1), r"UnseenTest\.max_clients is -1"),
        (lambda: PersonalTest(epochs=0), r"PersonalTest\.epochs is 0"),
        (lambda: PersonalTest(lr=0.0), r"PersonalTest\.lr is 0\.0; it must be above 0"),
    ],
)
def test_settings_are_checked(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_evaluation_on_validation_data(tmp_path: Path) -> None:
    # A third of client 1's three samples is held out (client 0's single one stays): weights 1 and 2 give
    # w = (1·1/3, 2·2/3) = (1/3, 4/3). Only client 1 has validation data, which is all of the shared set.
    made = fit(
        tmp_path,
        Validated(),
        Points(val_fraction=0.34),
        max_rounds=1,
        evaluate_on="val",
        protocols=[GlobalTest(), ClientTest(), PersonalTest()],
    )
    expected = loss(4 / 3, 4)
    assert made.metrics["global/loss"] == pytest.approx(expected)
    assert made.metrics["clients/loss_mean"] == made.metrics["clients/loss_min"] == pytest.approx(expected)
    assert made.metrics["personal/loss_mean"] == pytest.approx(expected / 4)
    stages = {(r["client_id"], r["stage"]) for r in rows(made.log_dir / "clients.csv") if r["stage"] != "train"}
    assert stages == {("1", "test"), ("1", "personal")}


def test_validation_without_validation_data(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set data\.init_args\.val_fraction above 0"):
        fit(tmp_path, evaluate_on="val")


def test_evaluate_every(tmp_path: Path) -> None:
    made = fit(tmp_path, max_rounds=5, evaluate_every=2, protocols=[GlobalTest()])
    evaluated = [row["round"] for row in rows(made.log_dir / "metrics.csv") if row["global/loss"]]
    assert evaluated == ["1", "3", "4"]  # every second round, and the last


def test_no_evaluation(tmp_path: Path) -> None:
    made = fit(tmp_path, evaluate_every=0)
    assert not [name for name in made.metrics if name.startswith(("global", "clients", "time/eval"))]


def test_a_protocol_of_ones_own_sees_the_federation_after_the_step(tmp_path: Path) -> None:
    class Norm(Protocol):
        name = "norm"

        def run(self, federation: Any, round_idx: int, subset: Any) -> Evaluation:
            state = federation.global_model(round_idx)
            return Evaluation({"norm/w": float(state["network.weight"].abs().sum()), "norm/round": round_idx})

    class Noting(Callback):
        found: dict[str, float] | None = None

        def on_round_end(self, run: Any, record: Any) -> None:
            self.found = dict(record.metrics)

    noting = Noting()
    fit(tmp_path, max_rounds=1, protocols=[Norm()], callbacks=[noting])
    assert noting.found is not None
    assert (noting.found["norm/w"], noting.found["norm/round"]) == (sum(AFTER_ONE), 0)


def test_validate_and_test_after_training(tmp_path: Path) -> None:
    module, data, algorithm = Validated(), Points(val_fraction=0.34), FedAvg()
    made = trainer(tmp_path, max_rounds=1, protocols=[GlobalTest()])
    made.fit(module, data, algorithm)
    assert made.validate(module, data, algorithm)["global/loss"] == pytest.approx(loss(4 / 3, 4))
    expected = (loss(1 / 3, 2) + 3 * loss(4 / 3, 4)) / 4
    assert made.test(module, data, algorithm)["global/loss"] == pytest.approx(expected)
    fresh = trainer(tmp_path, protocols=[GlobalTest()])
    assert fresh.test(Validated(), Points(val_fraction=0.34), FedAvg(), "last")["global/loss"] == pytest.approx(
        expected
    )


def test_there_is_no_global_model_where_a_part_is_personal(tmp_path: Path) -> None:
    # The server holds an untrained head; its accuracy would look like a result.
    metrics = fit(tmp_path, Wanderer(), Points(4, sizes=(2, 3)), Wandering(), max_rounds=1).metrics
    assert not [name for name in metrics if name.startswith("global/")]
    assert "clients/loss_mean" in metrics


def test_clients_on_the_shared_set_and_before_the_broadcast(tmp_path: Path) -> None:
    """Every client of FedAvg has the global model, whoever's data it is tested on."""
    made = fit(tmp_path, max_rounds=1, protocols=[GlobalTest(), ClientTest(), ClientGlobalTest(), LocalTest()])
    one, two = loss(AFTER_ONE[0], 2), loss(AFTER_ONE[1], 4)
    assert made.metrics["clients_global/loss_mean"] == made.metrics["global/loss"] == pytest.approx((one + 3 * two) / 4)
    assert made.metrics["clients_global/loss_std"] == 0.0
    assert made.metrics["local/loss_mean"] == made.metrics["clients/loss_mean"]
    stages = {row["stage"] for row in rows(made.log_dir / "clients.csv")}
    assert stages == {"train", "test", "global", "local"}
