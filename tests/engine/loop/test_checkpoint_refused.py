"""Checkpoints that do not belong to a run, and files that are none: refused in one line, before anything is touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lit_fed.callbacks import Checkpoint
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.errors import CheckpointError, UnreadableFile
from lit_fed.methods import FedAvg, FedProx, Scaffold
from tests.engine.loop.test_checkpoint import checkpoints
from tests.support import LeastSquares, Threes, Wanderer, Wandering, assert_same, fit, trainer, weights

# ---------------------------------------------------------------------- what does not belong together


def test_another_seed_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, max_rounds=1)
    with pytest.raises(CheckpointError, match=r"comes from a run with seed 0; set trainer\.seed 0 to use it"):
        fit(tmp_path, max_rounds=2, seed=1, ckpt_path="last")


EVERY_USE: list[Callable[..., Any]] = [
    lambda made, parts: made.fit(*parts, ckpt_path="last"),
    lambda made, parts: made.validate(*parts, ckpt_path="last"),
    lambda made, parts: made.test(*parts, ckpt_path="last"),
    lambda made, parts: made.predict(*parts, ckpt_path="last"),
    lambda made, parts: made.predict(*parts, ckpt_path="last", client_position=1),
]


@pytest.mark.parametrize("use", EVERY_USE)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": lambda: Threes(4, val_fraction=1 / 3)}, "whose clients had other data; use it with that run's conf"),
        ({"data": lambda: Threes(3, val_fraction=2 / 3)}, "whose clients had other data; use it with that run's conf"),
        ({"task": lambda: Plane()}, r"does not fit FedAvg on Plane: model\.network\.weight has shape \(1, 2\) there"),
        ({"algorithm": Scaffold}, r"does not fit Scaffold on LeastSquares: the server's state has 'control' here only"),
        ({"seed": 1}, r"comes from a run with seed 0; set trainer\.seed 0 to use it"),
    ],
)
def test_another_runs_checkpoint_is_refused_whatever_it_is_for(
    tmp_path: Path, use: Any, changes: Any, message: str
) -> None:
    def parts(
        task: Any = LeastSquares, data: Any = lambda: Threes(3, val_fraction=1 / 3), algorithm: Any = FedAvg
    ) -> Any:
        return task(), data(), algorithm()

    trainer(tmp_path, max_rounds=1).fit(*parts())
    made = trainer(tmp_path, max_rounds=2, seed=changes.get("seed", 0))
    with pytest.raises(CheckpointError, match=message):
        use(made, parts(**{key: value for key, value in changes.items() if key != "seed"}))


def test_a_test_under_another_network_names_the_runs_own_settings(tmp_path: Path) -> None:
    first = trainer(tmp_path, max_rounds=1)
    first.describe("seed_everything: 0\n")
    first.fit(LeastSquares(), Threes(2), FedAvg())
    own = first.log_dir / "config.yaml"
    with pytest.raises(CheckpointError, match=rf"; the run's own settings are in \S*{own.name}$") as caught:
        trainer(tmp_path).test(Wanderer(), Threes(2), FedAvg(), ckpt_path="last")
    assert Path(str(caught.value).rpartition(" ")[2]).samefile(own)


class Plane(LeastSquares):
    """Another shape under the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(2, 3, bias=False)


@pytest.mark.parametrize(
    ("task", "algorithm", "message"),
    [
        (Wanderer, FedAvg, r"FedAvg on Wanderer: model has 'network\.0\.bias' here only"),
        (Plane, FedAvg, r"FedAvg on Plane: model\.network\.weight has shape \(1, 2\) there and \(3, 2\) here"),
        (LeastSquares, Scaffold, r"Scaffold on LeastSquares: the server's state has 'control' here only"),
    ],
)
def test_another_model_or_method_is_refused_in_one_line_that_names_both(
    tmp_path: Path, task: Any, algorithm: Any, message: str
) -> None:
    first = fit(tmp_path, max_rounds=1)
    before = {path: path.read_bytes() for path in first.log_dir.rglob("*") if path.is_file()}
    with pytest.raises(
        CheckpointError, match=rf"was saved by FedAvg on LeastSquares and does not fit {message}$"
    ) as caught:
        fit(tmp_path, task(), Threes(2), algorithm(), max_rounds=2, ckpt_path="last")
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in first.log_dir.rglob("*") if path.is_file()} == before


def test_a_method_whose_server_keeps_the_same_goes_on(tmp_path: Path) -> None:
    fit(tmp_path, max_rounds=1)
    resumed = fit(tmp_path, algorithm=FedProx(mu=0.0), max_rounds=2, ckpt_path="last")
    assert_same(weights(resumed), weights(fit(tmp_path / "whole", max_rounds=2)))


def test_what_a_server_comes_to_keep_later_is_taken(tmp_path: Path) -> None:
    class Remembering(FedAvg):
        """Keeps the means of every round, and nothing before the first."""

        def setup(self, models: Any, population: Any) -> Any:
            return {**super().setup(models, population), "means": {}, "last": None, "steps": 0}

        def step(self, server: Any, aggregate: Any, cohort: Any) -> dict[str, float]:
            server["means"][str(cohort.round_idx)] = aggregate["network.weight"].clone()
            server["last"], server["steps"] = server["means"][str(cohort.round_idx)], server["steps"] + 1
            return super().step(server, aggregate, cohort)

    fit(tmp_path, algorithm=Remembering(), max_rounds=2)
    resumed = fit(tmp_path, algorithm=Remembering(), max_rounds=4, ckpt_path="last").run.federation.server
    whole = fit(tmp_path / "whole", algorithm=Remembering(), max_rounds=4).run.federation.server
    assert_same(resumed["means"], whole["means"])
    assert list(resumed["means"]) == ["0", "1", "2", "3"]
    assert torch.equal(resumed["last"], whole["last"])
    assert resumed["steps"] == 4


def broken(server: dict[str, Any]) -> list[Any]:
    """What somebody may have made of a server's state by hand."""
    weight = server["model"]["network.weight"]
    return [
        {},
        {"model": {}},
        {"model": weight},
        {"model": None},
        {"model": [weight]},
        {"model": {"network.weight": 3.0}},
        {"model": {"network.weight": None}},
        {"model": {"network.weight": {"network.weight": weight}}},
        {"model": {"network.weight": weight.flatten()}},
        {"model": {"network.weight": weight.to(torch.complex64)}},
        {"model": {"network.weight": weight, 7: weight}},
        {"model": {"network.weight": weight}, 7: weight},
        {"models": {"model": {"network.weight": weight}}},
    ]


def test_a_broken_server_is_refused_in_one_line(tmp_path: Path) -> None:
    made = fit(tmp_path, max_rounds=1)
    path = checkpoints(made) / "last.ckpt"
    content = read_checkpoint(path)
    for server in broken(content["server"]):
        torch.save(content | {"server": server}, path)
        with pytest.raises(CheckpointError, match="was saved by FedAvg on LeastSquares and does not fit") as caught:
            fit(tmp_path, max_rounds=2, ckpt_path=str(path))
        assert "\n" not in str(caught.value)
    for name in ("none", "network.weight"):
        torch.save(content | {"initial": {"model": {name: torch.ones(1)}}}, path)
        with pytest.raises(CheckpointError, match=r"does not fit FedAvg on LeastSquares: initial\.model"):
            fit(tmp_path, max_rounds=2, ckpt_path=str(path))
    for initial in ({}, {"other": {}}, {"model": {}, 7: {}}):
        torch.save(content | {"initial": initial}, path)
        with pytest.raises(CheckpointError, match=r"comes from a run whose trainer\.kinds differ from this one's in '"):
            fit(tmp_path, max_rounds=2, ckpt_path=str(path))


def test_a_callbacks_broken_state_is_refused_by_name(tmp_path: Path) -> None:
    path = checkpoints(fit(tmp_path, max_rounds=1)) / "last.ckpt"
    torch.save(read_checkpoint(path) | {"callbacks": {"Checkpoint": {"worst": 1.0}}}, path)
    with pytest.raises(CheckpointError, match=r"last\.ckpt has a state that callback Checkpoint cannot load: KeyError"):
        fit(tmp_path, max_rounds=2, ckpt_path="last")


def test_weights_of_another_precision_are_converted(tmp_path: Path) -> None:
    whole = fit(tmp_path, max_rounds=1)
    doubled = fit(tmp_path, max_rounds=2, precision="64-true", ckpt_path="last")
    assert weights(doubled)["network.weight"].dtype == torch.float64
    # Rounds 1 and 2 are exact in float32, so either precision has the same numbers.
    assert (
        weights(doubled)["network.weight"].tolist()
        == weights(fit(tmp_path / "32", max_rounds=2))["network.weight"].tolist()
    )
    assert weights(whole)["network.weight"].dtype == torch.float32


# ---------------------------------------------------------------------- files that are none


MAPPINGS = ("server", "initial", "callbacks", "metrics", "tasks", "inputs")

EMPTY = torch.zeros(0, 2, dtype=torch.int64)


def write(path: Path, **changes: Any) -> Path:
    """A checkpoint as a run writes it, but for what is given; None leaves an entry out."""
    content: dict[str, Any] = {key: {} for key in (*MAPPINGS, "state_dict", "models")}
    content |= {"lit_fed_format": 6, "round_idx": 0, "seed": 0, "partition": "", "method": "FedAvg", "config": ""}
    content |= {"monitor": None, "clients": EMPTY, "data": {"sha256": ""}} | changes
    torch.save({key: value for key, value in content.items() if value is not None or key == "monitor"}, path)
    return path


def test_missing_foreign_newer_and_older_files(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        read_checkpoint(path)
    assert read_checkpoint(write(path))["round_idx"] == 0
    with pytest.raises(CheckpointError, match="written by a newer lit_fed; upgrade the package"):
        read_checkpoint(write(path, lit_fed_format=7))
    with pytest.raises(CheckpointError, match="written by an older lit_fed, whose checkpoints had another form"):
        read_checkpoint(write(path, lit_fed_format=5))
    for key in ("seed", "metrics"):
        with pytest.raises(CheckpointError, match=f"is not a lit_fed checkpoint: '{key}' is missing"):
            read_checkpoint(write(path, **{key: None}))
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="is not a lit_fed checkpoint"):
        read_checkpoint(path)
    torch.save(nn.Linear(1, 1), path)
    with pytest.raises(CheckpointError, match="can be loaded safely"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lit_fed_format", "3", "it may come from another program"),
        ("lit_fed_format", True, "it may come from another program"),
        *((key, [], f"'{key}' is of type list") for key in MAPPINGS),
        ("round_idx", "3", "'round_idx' is of type str"),
        ("round_idx", -1, "'round_idx' is -1"),
        ("monitor", 3, "'monitor' is of type int"),
        ("config", {}, "'config' is of type dict"),
        ("initial", {"model": 3}, "'model' in 'initial' is of type int"),
        ("callbacks", {"Recorder": 3}, "'Recorder' in 'callbacks' is of type int"),
        ("metrics", {"global/acc": "good"}, "'global/acc' in 'metrics' is of type str"),
        *(("clients", clients, "'clients' is of type") for clients in ({}, {"1": (0, 0)}, [])),
        ("clients", EMPTY.double(), "'clients' has a tensor of float64 (0, 2)"),
        ("clients", EMPTY[:, :1], "'clients' has a tensor of int64 (0, 1)"),
        ("clients", EMPTY[0:0, 0], "'clients' has a tensor of int64 (0,)"),
        ("clients", torch.tensor([[1, 5], [0, -1]]), "'clients' has a negative version, -1"),
        ("clients", torch.tensor([[1, 5], [1, 6]]), "'clients' has a client with two versions"),
        *(("data", data, "'data' is not a fingerprint") for data in ({}, {"sha256": 3}, {"sha256": "", "size": 1})),
    ],
)
def test_content_that_no_run_has_written(tmp_path: Path, key: str, value: Any, message: str) -> None:
    path = write(tmp_path / "x.ckpt", **{key: value})
    with pytest.raises(CheckpointError, match=r"x\.ckpt is not a lit_fed checkpoint") as caught:
        read_checkpoint(path)
    assert message in str(caught.value)


def test_truncated_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.ckpt", state_dict={"w": torch.ones(1000)})
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"x\.ckpt is (corrupt|not a checkpoint)"):
            read_checkpoint(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda content: b"\x80\x02" + content))
def test_any_bytes_are_refused_with_our_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.ckpt is "):
        read_checkpoint(path)


def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    """To read the memory of a process from its beginning on is an input/output error."""
    path = tmp_path / "last.ckpt"
    path.symlink_to("/proc/self/mem")
    with pytest.raises(
        UnreadableFile, match=r"last\.ckpt cannot be read: Input/output error; it may be intact"
    ) as caught:
        read_checkpoint(path)
    assert "corrupt" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    path = write(tmp_path / "x.ckpt")
    path.chmod(0)
    with pytest.raises(UnreadableFile, match=r"x\.ckpt cannot be read: Permission denied; it may be intact"):
        read_checkpoint(path)
    tmp_path.chmod(0)
    try:
        with pytest.raises(UnreadableFile, match=r"x\.ckpt cannot be read: Permission denied; it may be intact"):
            read_checkpoint(path)
    finally:
        tmp_path.chmod(0o700)


def test_states_of_a_best_checkpoint_that_cannot_be_read_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(rounds: int, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        worst = Checkpoint(monitor="clients/loss_mean", mode="max")  # which is that of the first round
        return fit(tmp_path, Wanderer(0.05), Threes(3), Wandering(), max_rounds=rounds, callbacks=[worst], **kwargs)

    best = run(2).log_dir / "checkpoints" / "best.ckpt"
    assert read_checkpoint(best)["round_idx"] == 1
    best.rename(tmp_path / "aside")
    best.symlink_to("/proc/self/mem")
    run(4, ckpt_path="last")
    assert "left as it is, and no state of a client is deleted: " in capsys.readouterr().out
    best.unlink()
    (tmp_path / "aside").rename(best)
    run(2, ckpt_path="best")
