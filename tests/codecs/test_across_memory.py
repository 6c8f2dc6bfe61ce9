"""A wire with memory, in whole runs: error feedback by hand, and the same bits whichever way a run is made."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lit_fed.callbacks import Callback, Checkpoint, RoundRecord
from lit_fed.codecs import QSGD, Codec, Context, Int8, RandomK, SignSGD, TopK
from lit_fed.engine.loop.run import Run
from lit_fed.engine.wire.channel import Direction
from lit_fed.errors import ClientFailure, ConfigError
from lit_fed.federation.messages.wire import decode
from lit_fed.federation.server.federate import federate
from lit_fed.federation.transport.security import Security
from lit_fed.methods import FedAvg, Scaffold
from lit_fed.participation import Asynchronous, FullParticipation, Speeds, Stragglers, UniformParticipation
from lit_fed.privacy import ClientLevel, SecureSum
from lit_fed.tensors import hash_of
from tests.engine.loop.test_across_versions import run as run_versions
from tests.federation.serving_support import free_address, served, working
from tests.federation.support import Make, Parts, assert_same_states, deploy, nodes_of, simulate
from tests.federation.test_across_faults import Killed, attempt
from tests.federation.transport.test_serving_grid import HOMES, logged, wanderers
from tests.support import (
    ROOT,
    LeastSquares,
    Neighbours,
    Points,
    Wanderer,
    Wandering,
    assert_same,
    fit,
    kept,
    rows,
    run_cli,
    trainer,
    weights,
)  # fmt: skip

ERROR = "codec/error/network.weight"


def chain() -> list[Codec]:
    """Sparse, then quantised, with the error of both kept."""
    return [TopK(0.3), QSGD()]


# ---------------------------------------------------------------------- error feedback


@given(st.lists(st.lists(st.integers(-(2**20), 2**20), min_size=7, max_size=7), min_size=1, max_size=8))
def test_what_was_sent_and_what_is_kept_is_all_that_there_was(updates: list[list[int]]) -> None:
    """Σ C(p_t) + e_T = Σ Δ_t, to the bit: multiples of 2^-10 below 2^10 add exactly in float64."""
    memory: dict[str, Tensor] = {}
    sent, total = torch.zeros(7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    for round_idx, numbers in enumerate(updates):
        update = torch.tensor(numbers, dtype=torch.float64) / 2**10
        context = Context(round_idx=round_idx, memory=memory, reference={"w": torch.full_like(update, 8.0)})
        arrived = Direction(TopK(0.2)).cross({"w": update + 8.0}, context)
        sent, total = sent + (arrived.payload["w"] - 8.0), total + update
    assert torch.equal(sent + memory["error/w"], total)


def test_signs_with_error_feedback_by_hand(tmp_path: Path) -> None:
    """Points under SignSGD: e of client 0 and 1 by hand, weights 1 and 3.

    round 0: client 0 moves (1, 0): mean |.| is ½, sends (½, ½), keeps (½, -½); client 1 moves (0, 2): sends (1, 1),
             keeps (-1, 1). w = ((½, ½) + 3 (1, 1)) / 4 = (⅞, ⅞)
    round 1: client 0 moves (½ (2 - ⅞), 0) = (9/16, 0), with e (17/16, -8/16): sends 25/32 (1, -1), keeps 9/32 (1, 1);
             client 1 moves (0, ½ (4 - ⅞)) = (0, 25/16), with e (-16/16, 41/16): sends 57/32 (-1, 1),
             keeps 25/32 (1, 1).
             w = (⅞, ⅞) + (25/32 (1, -1) + 3 · 57/32 (-1, 1)) / 4 = (⅞ - 146/128, ⅞ + 146/128)
    """
    made = fit(tmp_path, uplink_codec=SignSGD())
    assert weights(made)["network.weight"].tolist() == [[0.875 - 146 / 128, 0.875 + 146 / 128]]
    assert kept(made, 0)[ERROR].tolist() == [[9 / 32, 9 / 32]]
    assert kept(made, 1)[ERROR].tolist() == [[25 / 32, 25 / 32]]
    # A norm of 4 bytes and two bits in a byte, for each of two clients; without a codec two float32 each, as down.
    named = ("uplink_bytes", "uplink_uncoded_bytes", "downlink_bytes")
    assert [made.metrics[f"comm/{name}"] for name in named] == [10, 16, 16]
    assert "comm/downlink_uncoded_bytes" not in made.metrics


def test_memory_moves_when_the_update_is_made(tmp_path: Path) -> None:
    """As above: what is lost on its way has been sent, as far as its client knows."""
    made = fit(tmp_path, uplink_codec=SignSGD(), max_rounds=1, participation=FullParticipation(dropout_after=1.0))
    assert weights(made)["network.weight"].tolist() == [[0.0, 0.0]]
    assert [kept(made, client_id)[ERROR].tolist() for client_id in (0, 1)] == [[[0.5, -0.5]], [[-1.0, 1.0]]]
    named = ("uplink_bytes", "uplink_uncoded_bytes", "downlink_bytes")
    assert [made.metrics[f"comm/{name}"] for name in named] == [0, 0, 16]


def test_a_late_update_is_the_difference_to_what_its_client_received(tmp_path: Path) -> None:
    """As above; client 1 is late, and its (1, 1) from (0, 0) arrives in round 1 with weight 3.

    round 0: w = (½, ½). round 1: client 0 moves (¾, 0), with e (5/4, -2/4): sends (½, ½) + ⅞ (1, -1) = (11/8, -3/8);
             w = ((11/8, -3/8) + 3 (1, 1)) / 4 = (35/32, 21/32)
    """
    stragglers = Stragglers(deadline=0.02, speed_sigma=0.0, late="next_round")
    made = fit(tmp_path, uplink_codec=SignSGD(), participation=FullParticipation(stragglers=stragglers))
    assert weights(made)["network.weight"].tolist() == [[35 / 32, 21 / 32]]
    assert [float(row["comm/uplink_bytes"]) for row in rows(made.log_dir / "metrics.csv")] == [5, 10]
    assert [float(row["comm/uplink_uncoded_bytes"]) for row in rows(made.log_dir / "metrics.csv")] == [8, 16]


def test_a_users_codec_keeps_what_it_likes(tmp_path: Path) -> None:
    class Counting(Codec):
        """Counts a client's updates, and multiplies each by their number."""

        def encode(self, payload: Any, context: Context) -> Any:
            count = context.memory.get("count", torch.zeros(()))
            context.memory["count"] = count + 1
            return {name: tensor * (count + 1) for name, tensor in payload.items()}

        def decode(self, payload: Any, context: Context) -> Any:
            return payload

    # Round 0 as FedAvg: w = (¼, 1½). Round 1: twice the local models (1⅛, 1½) and (¼, 2¾) of FedAvg's by hand:
    #   2 (1⅛ + 3 · ¼) / 4 = 15/16 and 2 (1½ + 3 · 2¾) / 4 = 39/8.
    made = fit(tmp_path, uplink_codec=Counting())
    assert weights(made)["network.weight"].tolist() == [[0.9375, 4.875]]
    assert kept(made, 1)["codec/count"].item() == 2


# ---------------------------------------------------------------------- the same bits


CODECS: dict[str, Callable[[], Any]] = {
    "topk": lambda: TopK(0.3),
    "chain": chain,
    "randomk": lambda: RandomK(0.4, feedback=False),
    "int8": Int8,
    "ef21": lambda: TopK(0.3, feedback="ef21"),
}


@pytest.mark.parametrize("algorithm", [FedAvg, Scaffold, Wandering])
@pytest.mark.parametrize("codec", ["chain", "randomk", "ef21"])
def test_resumed_in_the_middle_is_uninterrupted(tmp_path: Path, codec: str, algorithm: Any) -> None:
    def run(folder: str, rounds: int, ckpt_path: str | None = None) -> Any:
        torch.manual_seed(0)
        return fit(
            tmp_path / folder, Wanderer(), Points(num_clients=5, sizes=(2, 3)), algorithm(), max_rounds=rounds,
            participation=UniformParticipation(count=3), uplink_codec=CODECS[codec](), ckpt_path=ckpt_path,
        )  # fmt: skip

    whole = run("whole", 6)
    run("parts", 3)
    parts = run("parts", 6, "last")
    assert_same(weights(whole), weights(parts))
    for client_id in whole.run.federation.store.clients():
        assert_same(kept(whole, client_id), kept(parts, client_id))
    assert any(name.startswith("codec/error/") for name in whole.run.federation.store.get(0) or {}) == (
        codec == "chain"
    )


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_clients_in_flight_resume_with_their_memory(tmp_path: Path, executor: str) -> None:
    def run(folder: str, rounds: int, ckpt_path: str | None = None) -> Any:
        return run_versions(
            tmp_path / folder, rounds, Scaffold(), uplink_codec=chain(), executor=executor, ckpt_path=ckpt_path
        )

    whole = run("whole", 9)
    run("parts", 4)
    assert_same(weights(whole), weights(run("parts", 9, "last")))


@pytest.mark.parametrize("codec", CODECS)
def test_groups_are_one_after_the_other(tmp_path: Path, codec: str) -> None:
    found = [
        fit(tmp_path / how, data=Points(num_clients=6), uplink_codec=CODECS[codec](), executor=how, max_rounds=4)
        for how in ("sequential", "vectorized")
    ]
    assert_same(*map(weights, found))
    for client_id in found[0].run.federation.store.clients():
        assert_same(*(kept(made, client_id) for made in found))


@pytest.mark.parametrize("algorithm", [FedAvg, Scaffold, Wandering])
@pytest.mark.parametrize("codec", CODECS)
def test_nodes_have_the_bits_tables_and_states_of_one_process(tmp_path: Path, codec: str, algorithm: Any) -> None:
    make = wanderers(algorithm, uplink_codec=CODECS[codec](), downlink_codec=Int8(difference=False))
    one, other = simulate(make, tmp_path / "one"), deploy(make, tmp_path / "other", HOMES)
    assert_same(weights(one), weights(other))
    for name in ("metrics.csv", "clients.csv"):
        assert logged(one.log_dir, name) == logged(other.log_dir, name)
    assert_same_states(other, tmp_path / "other", one.run.federation.store.state_dict())


@pytest.mark.parametrize("codec", ["chain", "ef21"])
@pytest.mark.parametrize(("who", "at"), [("server", 13), ("node before", 12), ("node after", 12), ("node after", 21)])
def test_killed_nodes_go_on_with_their_memory(tmp_path: Path, who: str, at: int, codec: str) -> None:
    settings: dict[str, Any] = {"max_rounds": 3, "uplink_codec": CODECS[codec]()}
    make = wanderers(Wandering, **settings)
    whole = simulate(make, tmp_path / "whole")
    with pytest.raises(Killed if who == "server" else ClientFailure):
        attempt(make, tmp_path / "nodes", who, at, None)
    made = attempt(make, tmp_path / "nodes", "nobody", 0, "last")
    assert_same(weights(made), weights(whole))
    assert_same_states(made, tmp_path / "nodes", whole.run.federation.store.state_dict())


def test_a_node_that_is_asked_again_answers_the_same_bytes(tmp_path: Path) -> None:
    compared = 0

    def twice(nodes: Any) -> Any:
        def asked(handle: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
            def answer(blob: bytes) -> bytes:
                nonlocal compared
                first, second = handle(blob), handle(blob)
                if decode(blob).word == "train":
                    assert_same(*(dict(decode(one).tensors["payload"]) for one in (first, second)))
                    compared += 1
                return second

            return answer

        return {place + 1: asked(node.handle) for place, node in enumerate(nodes)}

    make = wanderers(FedAvg, uplink_codec=chain())
    made = deploy(make, tmp_path / "nodes", HOMES, handlers=twice)
    assert compared == 4 * 3
    assert_same(weights(made), weights(simulate(make, tmp_path / "one")))


def tensors_in(server: Any) -> list[tuple[str, str]]:
    """The server's tensors by name, as hashes."""
    found: list[tuple[str, str]] = []
    for name, entry in server.items():
        found += tensors_in(entry) if isinstance(entry, dict) else [(name, hash_of(entry))]
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("codec", "method"),
    [
        ("[{class_path: TopK, init_args: {share: 0.05}}, QSGD]", ()),
        (
            "[{class_path: TopK, init_args: {share: 0.05}}, QSGD]",
            ("--algorithm", "FedAMP", "--trainer.client_optimizer", "kept"),
        ),
        ("{class_path: TopK, init_args: {share: 0.05, feedback: ef21}}", ()),
    ],
    ids=["chain", "addressed", "ef21"],
)
def test_two_processes_are_one(tmp_path: Path, codec: str, method: tuple[str, ...]) -> None:
    words = (
        "fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--data.seed", "0", "--trainer.max_rounds", "3",
        "--trainer.uplink_codec", codec, "--trainer.downlink_codec", "CastCodec", "--trainer.accelerator", "cpu",
        *method,
    )  # fmt: skip
    for devices in ("1", "2"):
        (tmp_path / devices).mkdir()
        done = run_cli(*words, "--trainer.devices", devices, cwd=tmp_path / devices)
        assert done.returncode == 0, done.stderr
    one, two = (tmp_path / devices / "lightning_logs/version_0" for devices in ("1", "2"))
    saved = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["server"] for run in (one, two)]
    assert tensors_in(saved[0]) == tensors_in(saved[1])
    told = [
        [{k: v for k, v in row.items() if k.startswith("comm/")} for row in rows(run / "metrics.csv")]
        for run in (one, two)
    ]
    assert told[0] == told[1]
    assert {f"comm/{way}_uncoded_bytes" for way in ("uplink", "downlink")} <= told[0][0].keys()


class ByAdam(Wanderer):
    """Its optimizer keeps moments and a count."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def everything(folder: Path, rounds: int = 5, participation: Any = None, **kwargs: Any) -> Parts:
    """Clients with words of their own, errors that they keep, and optimizers that they keep."""
    torch.manual_seed(0)
    made = trainer(
        folder, max_rounds=rounds, participation=participation or UniformParticipation(count=3), uplink_codec=chain(),
        downlink_codec=Int8(difference=False), client_optimizer="kept", **kwargs,
    )  # fmt: skip
    return Parts(made, ByAdam(), Points(num_clients=5, sizes=(2, 3)), Neighbours())


@pytest.mark.parametrize(
    "participation",
    [
        lambda: UniformParticipation(count=3),
        lambda: Asynchronous(concurrency=4, buffer=2, speeds=Speeds(sigma=1.0)),
        lambda: FullParticipation(stragglers=Stragglers(0.02, late="next_round"), dropout_after=0.3),
    ],
    ids=["rounds", "asynchronous", "late"],
)
def test_words_errors_and_optimizers_together_resume(tmp_path: Path, participation: Any) -> None:
    def run(folder: str, rounds: int, ckpt_path: str | None = None) -> Any:
        made, *parts = everything(tmp_path / folder, rounds, participation(), callbacks=[Checkpoint()])
        made.fit(*parts, ckpt_path=ckpt_path)
        return made

    whole = run("whole", 5)
    run("parts", 2)
    parts = run("parts", 5, "last")
    assert_same(weights(whole), weights(parts))
    for client_id in whole.run.federation.store.clients():
        assert_same(kept(whole, client_id), kept(parts, client_id))
    prefixes = {name.partition("/")[0] for name in kept(whole, next(whole.run.federation.store.clients()))}
    assert prefixes == {"codec", "optimizer"}
    tables = [rows(made.log_dir / "metrics.csv") for made in (whole, parts)]
    counted = [[{key: row[key] for key in row if key.startswith("comm/")} for row in table] for table in tables]
    assert counted[0] == counted[1]


def test_words_errors_and_optimizers_together_on_nodes(tmp_path: Path) -> None:
    one, other = simulate(everything, tmp_path / "one"), deploy(everything, tmp_path / "other", HOMES)
    assert_same(weights(one), weights(other))
    for name in ("metrics.csv", "clients.csv"):
        assert logged(one.log_dir, name) == logged(other.log_dir, name)
    assert_same_states(other, tmp_path / "other", one.run.federation.store.state_dict())


# ---------------------------------------------------------------------- around a method


def test_personal_parts_stay_and_are_not_packed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = fit(tmp_path, Wanderer(), Points(4, sizes=(2, 3)), Wandering(), uplink_codec=TopK(0.5))
    names = kept(made, 0).keys()
    assert {"network.3.weight", "state/rounds", "codec/error/network.0.weight"} <= names
    assert not [name for name in names if name.startswith("codec/") and ("network.3" in name or "running" in name)]


def test_buffers_travel_as_they_are(tmp_path: Path) -> None:
    """Batch norm's statistics are the clients' mean, as without a codec, in the round before weights differ."""

    def run(folder: str, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return weights(fit(tmp_path / folder, Wanderer(), Points(4, sizes=(2, 3)), max_rounds=1, **kwargs))

    plain, coded = run("plain"), run("coded", uplink_codec=SignSGD())
    for name in ("network.1.running_mean", "network.1.running_var", "network.1.num_batches_tracked"):
        assert torch.equal(plain[name], coded[name])
    assert not torch.equal(plain["network.0.weight"], coded["network.0.weight"])


def test_an_update_that_arrives_stays_within_the_bound_of_privacy(tmp_path: Path) -> None:
    """The server clips what arrives: two clients move the sum by at most 2 · 0.1, whatever their codec makes of it."""
    private = ClientLevel(clip_norm=0.1, noise_multiplier=0.0)
    made = fit(tmp_path, algorithm=FedAvg(weighting="uniform"), uplink_codec=SignSGD(), privacy=private, max_rounds=1)
    # Clipped movements (.1, 0) and (0, .1) are sent as (.05, .05) each, of norm .0707 below the bound: their mean.
    torch.testing.assert_close(weights(made)["network.weight"], torch.tensor([[0.05, 0.05]]), rtol=1e-6, atol=0)
    more = fit(
        tmp_path / "more", algorithm=FedAvg(weighting="uniform"), privacy=private, max_rounds=1,
        uplink_codec=RandomK(0.5, feedback=False),
    )  # fmt: skip
    # One of two entries times 2: (.2, 0) or nothing, cut to .1 by the server.
    assert weights(more)["network.weight"].norm().item() <= 0.1 + 1e-6


@pytest.mark.parametrize("codec", [TopK(), RandomK(), QSGD(), [TopK(), QSGD()]])
def test_a_secure_sum_refuses_codecs_by_name(codec: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.uplink_codec needs single updates, which trainer\.secure_sum"):
        trainer(Path(), uplink_codec=codec, secure_sum=SecureSum(clip=1.0, threshold=3, nodes=4))


def test_a_downlink_keeps_nothing() -> None:
    for codec in (TopK(), SignSGD(difference=False), QSGD()):
        match = rf"trainer\.downlink_codec {type(codec).__name__} has difference or feedback.*; set difference and fee"
        with pytest.raises(ConfigError, match=match):
            trainer(Path(), downlink_codec=codec)


def test_a_codec_of_before_is_refused_in_one_line() -> None:
    class Old(Codec):
        def encode(self, payload: Any) -> Any:  # type: ignore[override]  # as before there was a context
            return payload

        def decode(self, payload: Any) -> Any:  # type: ignore[override]  # likewise
            return payload

    match = r"trainer\.uplink_codec Old has encode\(payload.*\).*; encode and decode take \(payload, context\)"
    with pytest.raises(ConfigError, match=match):
        trainer(Path(), uplink_codec=Old())


def test_what_a_codec_spoils_is_not_kept(tmp_path: Path) -> None:
    class Large(LeastSquares):
        def __init__(self) -> None:
            super().__init__(lr=2.0**126)

    with pytest.raises(ClientFailure, match=r"client \d failed in round 0: its update is no longer finite after"):
        fit(tmp_path, Large(), uplink_codec=RandomK(0.5, feedback=False), max_rounds=1)


def test_another_shape_of_the_kept_error_is_named() -> None:
    context = Context(memory={"error/w": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"keeps \(3,\) as error of 'w', \(4,\) here; set feedback to"):
        Direction(TopK()).pack({"w": torch.ones(4)}, context)


# ---------------------------------------------------------------------- bytes


class Wide(LeastSquares):
    """f(x) is the mean of 300,000 linear outputs: 600,000 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(2, 300_000, bias=False)
        nn.init.zeros_(self.network.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).mean(1, keepdim=True)


class Meter:
    """A relay in front of a server that counts the bytes of its sockets, up and down."""

    def __init__(self, to: str) -> None:
        host, port = to.split(":")
        self.to, self.up, self.down = (host, int(port)), 0, 0
        self.door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.door.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self.door.accept()
            threading.Thread(target=self._relay, args=(near,), daemon=True).start()

    def _relay(self, near: socket.socket) -> None:
        with near, suppress(OSError), socket.create_connection(self.to) as far:
            while True:
                for one in select.select([near, far], [], [])[0]:
                    if not (data := one.recv(2**16)):
                        return
                    self.up += len(data) if one is near else 0
                    self.down += len(data) if one is far else 0
                    (far if one is near else near).sendall(data)


class Measured(Callback):
    """Reads a meter after each round, and the run's own count."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.seen = meter, list[tuple[int, int, float, float]]()

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        counted = record.metrics["comm/uplink_bytes"], record.metrics["comm/downlink_bytes"]
        self.seen.append((self.meter.up, self.meter.down, *counted))


def test_bytes_are_those_that_grpc_carries(tmp_path: Path) -> None:
    """Between the ends of rounds 0 and 2, both ways, within 0.5 % of the sockets' bytes."""
    address = free_address()
    meter = Meter(address)
    measured = Measured(meter)
    make: Make = lambda folder: Parts(  # noqa: E731
        trainer(
            folder, max_rounds=3, evaluate_every=0, uplink_codec=[TopK(0.1), QSGD(levels=127)],
            downlink_codec=Int8(difference=False), callbacks=[measured] if folder.name == "server" else [],
        ),
        Wide(), Points(), FedAvg(),
    )  # fmt: skip
    nodes = nodes_of(make, tmp_path / "nodes", [[0], [1]])
    made, *parts = make(tmp_path / "server")
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        grid = stack.enter_context(served(None, address))
        for node in nodes:
            stack.enter_context(working(node, meter.address, Security()))  # type: ignore[arg-type]
        federate(grid, made, *parts)
    up, down = (measured.seen[-1][way] - measured.seen[0][way] for way in (0, 1))
    counted_up, counted_down = (sum(seen[way] for seen in measured.seen[1:]) for way in (2, 3))
    assert counted_up == pytest.approx(up, rel=0.005)
    assert counted_down == pytest.approx(down, rel=0.005)
    # 60,000 of 600,000 places in 20 bits and values in 8, with a norm for each 512; 8 bits, and a scale for each 2.
    assert counted_up == 4 * (150_000 + 60_000 + 4 * 118)
    assert counted_down == 4 * (600_000 + 4 * 300_000)
