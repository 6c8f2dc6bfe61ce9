"""An asynchronous federation over nodes: its order is that of arrival, and a replay of it ends in the same bits."""

from __future__ import annotations

import hashlib
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed import FederatedTrainer
from lit_fed.callbacks import Callback, Checkpoint
from lit_fed.codecs import QSGD, CastCodec, TopK
from lit_fed.engine.loop.run import Run
from lit_fed.errors import CheckpointError, ClientFailure, ConfigError, NobodyLeft
from lit_fed.federation.server.executor import Patience
from lit_fed.federation.server.federate import federate
from lit_fed.federation.transport.grid import MemoryGrid, Reply
from lit_fed.federation.transport.security import Security
from lit_fed.methods import FedAdam, FedAsync, FedAvg, FedBuff, Scaffold
from lit_fed.participation import Asynchronous
from lit_fed.privacy import SecureSum
from tests.federation.serving_support import free_address, served, working
from tests.federation.support import Make, Parts, nodes_of, simulate
from tests.federation.transport.test_serving_grid import logged
from tests.support import LeastSquares, Neighbours, Points, Wanderer, Wandering, assert_same, rows, trainer, weights

HOMES = [[0, 3], [1, 5, 6], [2, 4, 7]]


class ShuffledGrid(MemoryGrid):
    """Nodes that answer in an order from a seed."""

    def __init__(self, handlers: Any, seed: int) -> None:
        super().__init__(handlers)
        self.random = random.Random(seed)

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        """Let one node answer one message, and give all others another turn."""
        waiting = [message_id for message_id in message_ids if message_id in self._waiting]
        return super().pull([self.random.choice(waiting)] if waiting else [])


def wanderers(algorithm: Any, **settings: Any) -> Callable[[Any], Make]:
    """Makes parts with batch norm, dropout and clients of two and three samples, by participation."""

    def with_(participation: Callable[[], Any]) -> Make:
        def make(folder: Path) -> Parts:
            torch.manual_seed(0)
            own = {"max_rounds": 8, "callbacks": [Checkpoint()], **settings}
            made = trainer(folder, participation=participation(), **own)
            return Parts(made, Wanderer(), Points(num_clients=8, sizes=(2, 3)), algorithm())

        return make

    return with_


def live(**kwargs: Any) -> Asynchronous:
    return Asynchronous(**({"concurrency": 5, "buffer": 2} | kwargs))


def deploy(
    make: Make, folder: Path, seed: int = 0, ckpt_path: str | None = None, handlers: Any = None, **kwargs: Any
) -> FederatedTrainer:
    nodes = nodes_of(make, folder, HOMES)
    made, *parts = make(folder)
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        answers = {place + 1: node.handle for place, node in enumerate(nodes)}
        federate(ShuffledGrid(handlers(answers) if handlers else answers, seed), made, *parts, ckpt_path, **kwargs)
    return made


def replay(with_: Any, folder: Path, of: FederatedTrainer, **kwargs: Any) -> FederatedTrainer:
    order = str(of.log_dir / "order.csv")
    return simulate(with_(lambda: live(replay=order, **kwargs)), folder)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        pytest.param(FedBuff, {}, id="fedbuff"),
        pytest.param(FedAsync, {}, id="fedasync"),
        pytest.param(FedAdam, {"local_epochs": 2}, id="fedadam"),
        pytest.param(Scaffold, {"local_steps": 3, "gradient_clip_val": 0.1}, id="scaffold"),
        pytest.param(Wandering, {"gradient_clip_val": 0.1}, id="personal layer"),
        pytest.param(Neighbours, {"downlink_codec": CastCodec("float16")}, id="addressed"),
        pytest.param(Neighbours, {"uplink_codec": [TopK(0.3), QSGD()], "downlink_codec": CastCodec()}, id="memory"),
        pytest.param(FedAvg, {"uplink_codec": CastCodec(), "downlink_codec": CastCodec("float16")}, id="codecs"),
    ],
)
def test_a_replay_ends_in_the_bits_of_the_nodes(tmp_path: Path, algorithm: Any, settings: dict[str, Any]) -> None:
    with_ = wanderers(algorithm, **settings)
    for seed in (0, 1):
        nodes = deploy(with_(live), tmp_path / f"nodes_{seed}", seed)
        again = replay(with_, tmp_path / f"again_{seed}", nodes)
        assert_same(weights(nodes), weights(again))
        for name in ("metrics.csv", "clients.csv"):
            assert logged(nodes.log_dir, name) == logged(again.log_dir, name)
        table = rows(nodes.log_dir / "order.csv")
        assert len(table) == 16
        assert {row["fate"] for row in table} == {"on_time"}
        stale = [int(row["round"]) - int(row["version"]) for row in table]
        assert max(stale) > 0, "nobody was overtaken"


def test_the_order_differs_and_so_do_the_bits(tmp_path: Path) -> None:
    with_ = wanderers(FedBuff)
    one, other = (weights(deploy(with_(live), tmp_path / f"{seed}", seed)) for seed in (0, 1))
    assert any(not torch.equal(one[name], other[name]) for name in one)


class Slow:
    """A node that takes some time for each message, another one for each; one node at a time, as all share torch."""

    lock = threading.Lock()

    def __init__(self, node: Any, seed: int) -> None:
        self.node, self.random, self.limit, self.said = node, random.Random(seed), node.limit, list[str]()
        self.say, self.idle = self.said.append, node.idle

    @property
    def done(self) -> bool:
        return bool(self.node.done)

    def handle(self, blob: bytes) -> bytes:
        time.sleep(self.random.random() * 0.05)
        with self.lock:
            return bytes(self.node.handle(blob))


def test_a_replay_of_a_federation_over_sockets_has_its_hash(tmp_path: Path) -> None:
    def with_(participation: Callable[[], Any]) -> Make:
        settings: dict[str, Any] = {"max_rounds": 20, "evaluate_every": 5}
        return lambda folder: Parts(
            trainer(folder, participation=participation(), **settings),
            LeastSquares(),
            Points(num_clients=8),
            Scaffold(),
        )

    address = free_address()
    nodes = nodes_of(with_(live), tmp_path / "nodes", HOMES)
    made, *parts = with_(live)(tmp_path / "nodes")
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        grid = stack.enter_context(served(None, address))
        for seed, node in enumerate(nodes):
            stack.enter_context(working(Slow(node, seed), address, Security()))  # type: ignore[arg-type]
        federate(grid, made, *parts)
    again = replay(with_, tmp_path / "again", made)
    one, other = (
        hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights(run).values())).hexdigest()
        for run in (made, again)
    )
    assert one == other
    assert logged(made.log_dir, "metrics.csv") == logged(again.log_dir, "metrics.csv")
    assert len({row["version"] for row in rows(made.log_dir / "order.csv")}) > 5


def test_a_picture_shows_the_whole_order(tmp_path: Path) -> None:
    """The dashboard asks for earlier rounds' plans, which are in the file, also after a restart."""
    for seed, rounds in ((0, 5), (1, 8)):
        with_ = wanderers(FedBuff, max_rounds=rounds)
        made = deploy(with_(live), tmp_path, seed, "last")
    table = rows(made.log_dir / "order.csv")
    asked = [
        [(one.client_id, one.version, one.ended) for one in made.participation.plan(step)] for step in (3, 0, 6, 7)
    ]
    told = [
        sorted((int(row["version"]), int(row["client_id"]), float(row["ended"])) for row in table
               if int(row["round"]) == step) for step in (3, 0, 6, 7)
    ]  # fmt: skip
    assert [[(version, client_id, ended) for client_id, version, ended in plan] for plan in asked] == told


class Stop(Callback):
    """Ends a run after a round, as a kill would: the checkpoint of the round is there, `on_fit_end` is not called."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_round_start(self, run: Run, round_idx: int, plan: Any) -> None:
        if round_idx == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("algorithm", "stop", "uplink"),
    [(Wandering, 1, None), (Wandering, 4, None), (Wandering, 7, TopK(0.3)), (Neighbours, 4, [TopK(0.3), QSGD()])],
)
def test_a_killed_server_sends_the_work_again_and_replays_to_the_same_bits(
    tmp_path: Path, algorithm: Any, stop: int, uplink: Any
) -> None:
    settings: dict[str, Any] = {"downlink_codec": CastCodec(), "uplink_codec": uplink}
    with_ = wanderers(algorithm, **settings)
    killed = wanderers(algorithm, **settings, callbacks=[Stop(stop), Checkpoint()])
    with pytest.raises(KeyboardInterrupt):
        deploy(killed(live), tmp_path / "nodes")
    done = deploy(with_(live), tmp_path / "nodes", 1, "last")
    table = rows(done.log_dir / "order.csv")
    assert [int(row["round"]) for row in table] == [step for step in range(8) for _ in range(2)]
    ended = [float(row["clock/virtual_s"]) for row in rows(done.log_dir / "metrics.csv")]
    assert ended == sorted(ended), "the clock goes on"
    assert_same(weights(done), weights(replay(with_, tmp_path / "again", done)))


def failing(clients: set[int]) -> Any:
    """Nodes that answer nonsense to messages for some clients."""

    def around(answer: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
        def handle(blob: bytes) -> bytes:
            found = re.search(rb'"client": ?(\d+)', blob)
            return b"nothing" if found and int(found[1]) in clients else answer(blob)

        return handle

    return lambda answers: {node: around(answer) for node, answer in answers.items()}


def test_a_client_that_fails_fills_no_buffer_and_is_replayed(tmp_path: Path) -> None:
    with_ = wanderers(FedBuff, on_client_failure="skip")

    nodes = deploy(with_(live), tmp_path / "nodes", handlers=failing({3}))
    table = rows(nodes.log_dir / "order.csv")
    failed = [row for row in table if row["fate"] == "lost_before"]
    assert failed
    assert {row["client_id"] for row in failed} == {"3"}
    assert len(table) - len(failed) == 16
    for row in rows(nodes.log_dir / "metrics.csv"):
        of_step = [one for one in failed if one["round"] == row["round"]]
        assert float(row["participation/failed"]) == len(of_step)
    assert_same(weights(nodes), weights(replay(with_, tmp_path / "again", nodes)))


def test_a_failure_stops_a_run_that_tolerates_none(tmp_path: Path) -> None:
    with pytest.raises(ClientFailure, match="client 3"):
        deploy(wanderers(FedBuff)(live), tmp_path, handlers=failing({3}))


def test_too_stale_updates_are_dropped_as_they_are_replayed(tmp_path: Path) -> None:
    with_ = wanderers(Scaffold)
    nodes = deploy(with_(lambda: live(max_staleness=0)), tmp_path / "nodes")
    assert "lost_after" in {row["fate"] for row in rows(nodes.log_dir / "order.csv")}
    again = replay(with_, tmp_path / "again", nodes, max_staleness=0)
    assert_same(weights(nodes), weights(again))
    assert logged(nodes.log_dir, "metrics.csv") == logged(again.log_dir, "metrics.csv")


def test_a_cohort_below_the_smallest_stops_the_run(tmp_path: Path) -> None:
    with_ = wanderers(FedBuff, on_client_failure="skip")

    with pytest.raises(NobodyLeft, match="has answers from 1 of 8 clients, and the smallest cohort is 2"):
        deploy(with_(live), tmp_path, handlers=failing(set(range(8)) - {3}), patience=Patience(smallest_cohort=2))


def test_a_run_in_rounds_or_simulated_is_not_gone_on_with(tmp_path: Path) -> None:
    with_ = wanderers(FedBuff)
    simulate(with_(live), tmp_path)
    with pytest.raises(CheckpointError, match=r"comes from a run in rounds, or simulated; keep trainer\.participation"):
        deploy(with_(live), tmp_path, ckpt_path="last")


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"dropout_before": 0.1}, r"dropout_before simulates drop-outs, and nodes have their own; leave it out"),
        ({"dropout_after": 0.1}, r"dropout_after simulates drop-outs"),
        ({"replay": "order.csv"}, r"replay repeats an order in a simulation, with `lit-fed fit`; leave it out"),
    ],
)
def test_settings_of_a_simulation_alone(tmp_path: Path, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        federate(MemoryGrid({}), *wanderers(FedBuff)(lambda: live(**kwargs))(tmp_path))


def test_refusals_name_the_participation_that_was_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="under Asynchronous the server weighs each by its staleness"):
        deploy(wanderers(FedAvg, buffers="local", secure_sum=SecureSum(3, 1.0))(live), tmp_path)


def test_a_participation_of_ones_own_that_simulates_times_is_refused(tmp_path: Path) -> None:
    class Own(Asynchronous):
        pass

    with pytest.raises(ConfigError, match="is Own, which simulates times of arrival, and nodes have their own"):
        federate(MemoryGrid({}), *wanderers(FedBuff)(lambda: Own(2, 1))(tmp_path))


HEAD = "round,client_id,version,fate,began,ended\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1 is not round,client_id,version,fate,began,ended; use the order.csv of a run"),
        (HEAD, "has no steps"),
        (HEAD + "1,0,0,on_time,0,1\n", "line 2 is of step 1 after step -1; restore the missing rows"),
        (HEAD + "0,0,0,on_time,0,1\n2,1,0,on_time,0,1\n", "line 3 is of step 2 after step 0"),
        (HEAD + "0,8,0,on_time,0,1\n", "line 2 is of client 8, which does not take part"),
        (HEAD + "0,1,1,on_time,0,1\n", "line 2: client 1 cannot have started so; restore the file"),
        (HEAD + "0,1,0,on_time,0,1\n0,1,0,on_time,0,1\n", "line 3: client 1 cannot have started so"),
        (HEAD + "0,1,0,on_time,2,1\n", "line 2: client 1 cannot have started so"),
        (HEAD + "0,1,0,on_time,0,inf\n", "line 2: client 1 cannot have started so"),
        (HEAD + "0,1,0,late?,0,1\n", "line 2 is not a row of an order; restore the file"),
        (HEAD + "0,1,0\n", "line 2 is not a row of an order"),
        (HEAD + "0,1,0,on_time,0,1,2\n", "line 2 is not a row of an order"),
    ],
)
def test_orders_that_cannot_be_used(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "order.csv"
    path.write_text(text)
    made = live(replay=str(path))
    with pytest.raises(ConfigError, match=says):
        made.setup(8, lambda client_id: 1, 0)


def test_a_replay_ends_with_its_order_and_has_the_fates(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text(HEAD + "0,1,0,on_time,0.0,1.5\n0,0,0,lost_before,0.0,0.5\n1,2,0,on_time,0.0,2.5\n")
    made = live(replay=str(path))
    made.setup(8, lambda client_id: 1, 0)
    assert [(one.client_id, one.fate.value) for one in made.plan(0)] == [(0, "lost_before"), (1, "on_time")]
    assert (made.in_flight(0), made.clock(0, 0.0), made.clock(1, 0.0)) == ({0: {2: 2.5}}, 1.5, 2.5)
    with pytest.raises(ConfigError, match=r"has 2 steps; lower trainer.max_rounds to it"):
        made.plan(2)
    with pytest.raises(ConfigError, match=r"replay has a recorded run's fates; leave dropout_… and absent… out"):
        live(replay=str(path), dropout_before=0.1).setup(8, lambda client_id: 1, 0)
    with pytest.raises(ConfigError, match=r"replay absent.csv cannot be read"):
        live(replay="absent.csv").setup(8, lambda client_id: 1, 0)
