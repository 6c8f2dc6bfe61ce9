"""Privacy at sample level over nodes: each makes its own promise with its own key, and the server lists the claims."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_fed.errors import ConfigError
from lit_fed.federation.messages.wire import Message, decode, encode
from lit_fed.federation.node.node import Node
from lit_fed.federation.server.executor import Patience
from lit_fed.federation.server.federate import federate
from lit_fed.federation.server.roster import Gathering
from lit_fed.federation.transport.security import Security
from lit_fed.participation import FullParticipation
from lit_fed.privacy import SampleLevel
from lit_fed.privacy.accounting import Mechanism
from lit_fed.protocols import ClientTest, GlobalTest
from lit_fed.tasks import Classifier
from tests.federation.serving_support import Echo, free_address, served, working
from tests.federation.support import Make, Parts, deploy, nodes_of, simulate, small
from tests.privacy.support import uniform
from tests.privacy.test_sample_level import Blobs, mlp
from tests.support import assert_same, weights

pytest.importorskip("dp_accounting")
RUN = "0" * 16


@pytest.fixture
def one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key that is made is the same."""
    monkeypatch.setattr("lit_fed.privacy.keys.secrets", SimpleNamespace(token_hex=lambda size: "5a" * size))


def make(
    noise: float | None = 1.0,
    rounds: int = 2,
    key: bool = True,
    own: Mapping[str, Any] | None = None,
    task: Callable[[], Any] = mlp,
    data: Callable[[], Any] = Blobs,
    **kwargs: Any,
) -> Make:
    """Parts of three clients, with a key file in each end's folder; ``own`` are settings of the second node."""

    def parts(folder: Path) -> Parts:
        folder.mkdir(parents=True, exist_ok=True)
        given: dict[str, Any] = {
            "noise_multiplier": noise,
            "delta": 0.01,
            **(own or {} if "node_1" in folder.name else {}),
        }
        privacy = SampleLevel(0.5, key_file=str(folder / "key") if key else None, **given)
        settings: dict[str, Any] = {
            "participation": FullParticipation(), "protocols": [GlobalTest()], "on_client_failure": "skip", **kwargs
        }  # fmt: skip
        return small(task, data, uniform, max_rounds=rounds, privacy=privacy, **settings)(folder)

    return parts


def claims(made: Any) -> list[list[float]]:
    found: list[list[float]] = made.run.federation.server["around.privacy"]["_claims"].tolist()
    return found


def epsilon(rounds: Mapping[int, int], z: float = 1.0) -> float:
    """Of 20 samples in ⌈20 / 6⌉ = 4 steps a round."""
    return Mechanism("poisson", 20, 6, z).epsilon({k: 4 * n for k, n in rounds.items()}, 0.01)[0]


@pytest.mark.usefixtures("one_key")
@pytest.mark.parametrize("homes", [[[0, 1], [2]], [[0, 1, 2]]], ids=["two nodes", "one node"])
def test_over_nodes_is_the_simulation_where_the_keys_are_equal(homes: list[list[int]], tmp_path: Path) -> None:
    simulated = simulate(make(), tmp_path / "one")
    deployed = deploy(make(), tmp_path / "grid", homes)
    assert_same(weights(simulated), weights(deployed))
    assert deployed.metrics["privacy/epsilon"] == simulated.metrics["privacy/epsilon"] == epsilon({1: 2})
    assert claims(deployed) == [[epsilon({1: 2}), 0.01, 1.0]] * 3


def test_each_node_has_a_key_and_a_promise_of_its_own_and_the_card_lists_them(tmp_path: Path) -> None:
    made = deploy(make(own={"noise_multiplier": 2.0, "delta": 0.005}), tmp_path, [[0, 1], [2]])
    other = Mechanism("poisson", 20, 6, 2.0).epsilon({1: 8}, 0.005)[0]
    assert claims(made) == [[epsilon({1: 2}), 0.01, 1.0]] * 2 + [[other, 0.005, 2.0]]
    card = (made.log_dir / "privacy.md").read_text()
    assert f"| 2 | {other:.6g} | 0.005 | 2 |" in card
    assert "cannot check it" in card
    (line,) = made.run.federation.wrappers.closing_lines()
    assert "nodes claim epsilon up to" in line
    assert "for 3 of 3 clients" in line
    files = sorted(path for path in tmp_path.rglob("key.*"))
    assert [(path.parent.name, path.name) for path in files] == [
        ("node_0", "key.0"), ("node_0", "key.1"), ("node_1", "key.2"),
    ]  # fmt: skip
    keys = {path.read_text().split('"')[3] for path in [*files, tmp_path / "key"]}
    assert len(keys) == 4
    for path in made.log_dir.rglob("*"):
        assert not path.is_file() or not any(key.encode() in path.read_bytes() for key in keys)


def test_a_server_that_starts_again_gets_the_same_update_and_nothing_is_spent(tmp_path: Path) -> None:
    deploy(make(rounds=1), tmp_path, [[0, 1], [2]])
    shutil.copytree(tmp_path / "lightning_logs", tmp_path / "before")
    two = deploy(make(rounds=2), tmp_path, [[0, 1], [2]], ckpt_path="last")
    released = {path: path.read_text() for path in tmp_path.rglob("key.*")}
    shutil.rmtree(tmp_path / "lightning_logs")
    shutil.copytree(tmp_path / "before", tmp_path / "lightning_logs")  # as if its last checkpoint had been lost
    again = deploy(make(rounds=2), tmp_path, [[0, 1], [2]], ckpt_path="last")
    assert_same(weights(two), weights(again))
    assert {path: path.read_text() for path in tmp_path.rglob("key.*")} == released
    assert claims(again) == claims(two) == [[epsilon({1: 2}), 0.01, 1.0]] * 3


def told(node: Node, payload: Mapping[str, torch.Tensor], round_idx: int = 0) -> Message:
    """A node's answer to the training of its client 0."""
    fields = {"client": 0, "round": round_idx, "run": RUN, "boot": node.boot, "version": None, "drop": []}
    return decode(
        node.handle(encode(Message("train", {**fields, "together": [0], "frozen": {}}, {"payload": payload})))
    )


def test_another_broadcast_of_a_round_gets_other_noise_everywhere_and_is_charged(tmp_path: Path) -> None:
    sent = {name: tensor.clone() for name, tensor in mlp().state_dict().items()}
    off = {**sent, "network.3.bias": sent["network.3.bias"] + 1e-3}
    (node,) = nodes_of(make(), tmp_path, [[0]])
    with node.at_work():
        first, same, other = told(node, sent), told(node, sent), told(node, off)
    (node,) = nodes_of(make(), tmp_path, [[0]])  # restarted
    with node.at_work():
        last, later = told(node, off), told(node, sent, 1)
    assert_same(dict(first.tensors["payload"]), dict(same.tensors["payload"]))
    assert_same(dict(other.tensors["payload"]), dict(last.tensors["payload"]))
    for name, tensor in first.tensors["payload"].items():
        apart = (tensor - sent[name]) - (other.tensors["payload"][name] - off[name])
        # Deviation of a step's noise: lr · z · C / 6 · √2 = .1 · .5 / 6 · 1.4 = .012; of four, twice that.
        assert apart.abs().min() > 1e-7, "no coordinate tells of the difference without noise"
    spent = [message.fields["metrics"]["epsilon"] for message in (first, same, other, last, later)]
    assert spent == pytest.approx([epsilon(n) for n in ({1: 1}, {1: 1}, {2: 1}, {2: 1}, {1: 1, 2: 1})], rel=1e-12)
    lines = (tmp_path / "node_0" / "key.0").read_text().splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["0", "0", "1"]


class Blind(Blobs):
    """Samples whose last feature is 0: no sample looks at the weights of it."""

    def load_arrays(self) -> Any:
        arrays = super().load_arrays()
        arrays.train.x[:, 3] = 0
        return arrays


def least_apart(folder: Path) -> float:
    """The least by which what two broadcasts made differs in a coordinate, beside the difference of the broadcasts.

    They differ in weights at which no sample looks, so that all sums of gradients are equal.
    """
    sent = {name: tensor.clone() for name, tensor in mlp().state_dict().items()}
    off = {name: tensor.clone() for name, tensor in sent.items()}
    off["network.1.weight"][:, 3] += 0.5
    (node,) = nodes_of(make(data=Blind), folder, [[0]])
    with node.at_work():
        first, other = told(node, sent), told(node, off)
    made = [
        {n: t - begun[n] for n, t in one.tensors["payload"].items()} for one, begun in ((first, sent), (other, off))
    ]
    return min(float((made[0][name] - made[1][name]).abs().min()) for name in sent)


def test_broadcasts_that_differ_where_no_sample_looks_get_other_noise_everywhere(tmp_path: Path) -> None:
    # Deviation of four steps' difference: √4 · lr · z · C / 6 · √2 = .024. Of 131 coordinates the least is about
    # .024 · √(π/2) / 131 = 2e-4; below 1e-6 with probability .004. Rounding of weights up to 1: 6e-8.
    assert least_apart(tmp_path) > 1e-6


def test_the_comparison_finds_noise_that_is_named_by_the_sum_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SampleLevel, "_request_of", lambda self, client: "")
    assert least_apart(tmp_path) < 1e-6


@pytest.mark.parametrize("changed", ["received", "own", "state", "optimizers", "frozen", "is_new"])
def test_noise_is_named_by_all_that_a_client_begins_with(changed: str) -> None:
    def request(value: float) -> str:
        names = ("received", "own", "state", "optimizers")
        groups = {name: {"w": torch.tensor(value if name == changed else 1.0)} for name in names}
        frozen = {"w": torch.tensor(value if changed == "frozen" else 1.0)}
        model = SimpleNamespace(split=SimpleNamespace(frozen=()), tensors=lambda names: frozen)
        client: Any = SimpleNamespace(model=model, is_new=changed == "is_new" and value == 2.0, **groups)
        return SampleLevel(1.0, 1.0)._request_of(client)

    assert request(1.0) == request(1.0) != request(2.0)


class Telling(Classifier):
    """Logs in every hook of training, also what is not finite."""

    def on_train_start(self) -> None:
        self.log("started", 1.0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        self.log("last", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", 3.0, reduce_fx="sum")

    def on_train_epoch_end(self) -> None:
        self.log("train/mean_loss", float("nan"))

    def on_train_end(self) -> None:
        self.log("train/max_loss", float("inf"))


def of_blobs(kind: type[Classifier]) -> Classifier:
    torch.manual_seed(0)
    return kind(mlp().network, num_classes=3)


def test_an_answer_to_training_has_the_learning_rate_and_the_claim_alone(tmp_path: Path) -> None:
    (node,) = nodes_of(make(task=partial(of_blobs, Telling)), tmp_path, [[0]])
    with node.at_work():
        answer = told(node, of_blobs(Telling).state_dict())
    assert answer.word == "answer"
    assert answer.fields.keys() == {"client", "round", "silent", "sums", "weight", "metrics", "version"}
    assert answer.fields["metrics"] == {"lr": 0.1, "epsilon": epsilon({1: 1}), "delta": 0.01, "noise_multiplier": 1.0}
    assert answer.fields["sums"] == {}


class Failing(Classifier):
    """Fails on a sample with a large first feature; runs in turn."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if float(batch[0][:, 0].max()) > 100:
            raise ValueError("a row of the data")
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        return loss


class OneLarge(Blobs):
    """The last sample of client 0 has a large feature."""

    def load_arrays(self) -> Any:
        arrays = super().load_arrays()
        arrays.train.x[19, 0] = 1000
        return arrays


@pytest.mark.parametrize("data", [Blobs, OneLarge])
def test_a_sample_on_which_a_step_fails_fails_no_answer(
    data: type[Blobs], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_fed.privacy.sample_level._COMPARED", 2)  # the trial before the run does not see it
    (node,) = nodes_of(make(task=partial(of_blobs, Failing), data=data, local_epochs=4), tmp_path, [[0]])
    with node.at_work():
        answer = told(node, of_blobs(Failing).state_dict())
    assert answer.word == "answer", "16 batches, in each of which it is with .3"
    assert ("a row of the data" in capsys.readouterr().out) == (data is OneLarge), "only this machine is told"


def test_a_node_leaves_out_a_client_that_has_spent_its_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The noise of node 1 is worked out for its two rounds; its third is refused, and the others go on.
    own = {"noise_multiplier": None, "epsilon": 2.0}
    made = deploy(make(own=own), tmp_path, [[0, 1], [2]])
    assert 1.99 < claims(made)[2][0] <= 2
    made = deploy(make(own=own, rounds=3), tmp_path, [[0, 1], [2]], ckpt_path="last")
    out = capsys.readouterr().out
    assert "its samples have spent epsilon 2.0, by which its node leaves it out" in out
    assert claims(made)[0][0] == epsilon({1: 3})
    assert 1.99 < claims(made)[2][0] <= 2


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"noise": 2.0}, r"key\.0 holds an account with noise_multiplier 1\.0, and this node has 2\.0"),
        ({"local_epochs": 2}, r"holds an account with steps 4, and this node has 8"),
    ],
)
def test_a_node_goes_on_with_its_own_settings(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    nodes_of(make(), tmp_path, [[0, 1]])
    with pytest.raises(ConfigError, match=says):
        nodes_of(make(**changed), tmp_path, [[0, 1]])


def test_a_node_is_refused_that_would_tell_more_than_it_promises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.privacy\.key_file is None, and whoever has trainer\.seed"):
        nodes_of(make(key=False), tmp_path, [[0, 1, 2]])
    with pytest.raises(ConfigError, match=r"trainer\.protocols has ClientTest, by which this node tells of its"):
        nodes_of(make(protocols=[ClientTest()]), tmp_path, [[0, 1, 2]])


def test_a_node_reports_no_counts_of_classes_and_a_fingerprint_that_nobody_can_guess(tmp_path: Path) -> None:
    one, other = (nodes_of(make(), tmp_path / name, [[0]])[0].reports[0] for name in ("one", "other"))
    assert (one.samples, one.histogram) == (20, None)
    assert one.fingerprint != other.fingerprint, "the keys differ"
    assert nodes_of(make(), tmp_path / "one", [[0]])[0].reports[0] == one


@pytest.mark.parametrize("claim", [{"epsilon": -1.0}, {"epsilon": float("nan")}, {"delta": "0"}, {"epsilon": 1e300}])
def test_a_claim_that_no_node_can_make_is_dropped(claim: dict[str, Any], tmp_path: Path) -> None:
    def handlers(nodes: list[Node]) -> dict[int, Callable[[bytes], bytes]]:
        def handle(blob: bytes) -> bytes:
            said = decode(nodes[1].handle(blob))
            if "metrics" in said.fields:
                said.fields["metrics"].update(claim)
            return encode(said)

        return {1: nodes[0].handle, 2: handle}

    made = deploy(make(rounds=1), tmp_path, [[0, 1], [2]], handlers=handlers)
    assert made.run.failures.clients == {2}
    assert claims(made)[2] == [-1, -1, -1]
    assert "| 2 | none | none | none |" in (made.log_dir / "privacy.md").read_text()


def test_a_federation_does_not_go_on_as_a_simulation(tmp_path: Path) -> None:
    deploy(make(rounds=1), tmp_path, [[0, 1], [2]])
    with pytest.raises(ConfigError, match="the run began with clients on nodes; go on there"):
        simulate(make(rounds=2), tmp_path, "last")


@pytest.mark.usefixtures("one_key")
def test_over_sockets_is_the_simulation_too(tmp_path: Path) -> None:
    simulated = simulate(make(), tmp_path / "one")
    address, nodes = free_address(), nodes_of(make(), tmp_path / "grid", [[0, 1], [2]])
    made, model, data, algorithm = make()(tmp_path / "grid")
    one_at_a_time = threading.Lock()

    def alone(node: Node, blob: bytes) -> bytes:
        with one_at_a_time:  # they share this process's generators
            return node.handle(blob)

    with ExitStack() as stack:
        grid = stack.enter_context(served(None, address))
        for node in nodes:
            stack.enter_context(node.at_work())
            stack.enter_context(working(Echo(partial(alone, node)), address, Security()))
        federate(grid, made, model, data, algorithm, patience=Patience(round_s=60), gathering=Gathering(60))
    assert_same(weights(simulated), weights(made))
    assert claims(made) == [[epsilon({1: 2}), 0.01, 1.0]] * 3


def test_a_node_that_reports_sums_claims_for_each_client(tmp_path: Path) -> None:
    made = deploy(make(), tmp_path, [[0, 1], [2]], own={"report": "aggregate", "report_least": 1})
    assert claims(made) == [[epsilon({1: 2}), 0.01, 1.0]] * 3
