"""Privacy at sample level, by hand on `Points`: samples of client 0 are x=(1,0), y=2, of client 1 x=(0,1), y=4.

At w = 0 their gradients are (-2, 0) and (0, -4).
"""

from __future__ import annotations

import math
import shutil
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lit_fed.algorithm import Client, Pass, Phase
from lit_fed.callbacks import Callback, RoundRecord, Run
from lit_fed.command.cli import main
from lit_fed.data import Arrays, ClientFolders
from lit_fed.engine.wire.batches import batch_size_of
from lit_fed.errors import ConfigError
from lit_fed.methods import Ditto, FedAvg, LocalOnly
from lit_fed.methods.frozen_heads import CalibratedTest
from lit_fed.participation import (
    Asynchronous,
    Fate,
    FullParticipation,
    PoissonParticipation,
    Stragglers,
    UniformParticipation,
    WeightedParticipation,
)
from lit_fed.privacy import ClientLevel, SampleLevel
from lit_fed.privacy.accounting import Mechanism, calibrate
from lit_fed.privacy.keys import RunKey, reveal
from lit_fed.privacy.sample_gradients import SampleGradients
from lit_fed.robust import Median
from lit_fed.tasks import Classifier
from lit_fed.trainer import FederatedTrainer
from tests.privacy.support import uniform
from tests.support import ROOT, LeastSquares, Points, Wanderer, assert_same, fit, rows, weights

pytest.importorskip("dp_accounting")
W = "network.weight"


def points(*sizes: int, batch_size: int = 8, **kwargs: Any) -> Points:
    made = Points(sizes=(sizes[0], sizes[-1]), **kwargs)
    made.batch_size = batch_size
    return made


def run(folder: Path, clip_norm: float = 0.5, noise: float | None = 0.0, **kwargs: Any) -> FederatedTrainer:
    """A run of which everybody takes part in each round."""
    own = {name: kwargs.pop(name) for name in ("epsilon", "physical_batch", "key_file", "delta") if name in kwargs}
    privacy = SampleLevel(clip_norm, noise, **({"delta": 0.01} | own))
    return fit(folder, **({"data": points(2), "algorithm": uniform(), "max_rounds": 1, "privacy": privacy} | kwargs))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All batches from which gradients are taken."""
    found: list[Any] = []
    take = SampleGradients.take
    monkeypatch.setattr(SampleGradients, "take", lambda self, batch: (found.append(batch), take(self, batch))[1])
    return found


def test_the_gradient_of_each_sample_is_clipped_before_the_sum(tmp_path: Path) -> None:
    made = run(tmp_path)
    # Two times (-½, 0), over 2 expected: a step of ½ from 0 to (¼, 0), of the other client to (0, ¼); their mean.
    assert weights(made)[W].tolist() == [[0.125, 0.125]]


def test_the_sum_is_divided_by_the_expected_batch_and_not_by_its_size(tmp_path: Path, batches: list[Any]) -> None:
    sizes, moved = set(), set()
    for seed in range(4):
        batches.clear()
        made = run(tmp_path, data=points(4, batch_size=2), local_steps=1, seed=seed)
        found = [batch_size_of(batch) for batch in batches]
        # c clipped gradients of ½, over 2, by a rate of ½: c / 8 for each client, halved by the mean over both.
        assert weights(made)[W].tolist() == [[found[0] / 16, found[1] / 16]]
        sizes, moved = sizes | set(found), moved | {tuple(found)}
    assert len(sizes) > 2, "the batches have different sizes"


def test_an_empty_batch_is_a_step_of_noise(tmp_path: Path, batches: list[Any]) -> None:
    made = run(tmp_path, noise=1.0, data=points(64, batch_size=1), local_steps=8)
    assert len(batches) == 16
    assert 0 in map(batch_size_of, batches)  # each with probability (63/64)^64 = .37
    assert (weights(made)[W] != 0).all()
    assert account(made)[0] == [1, 1]


def test_every_sample_is_drawn_by_itself_with_the_stated_probability(tmp_path: Path, batches: list[Any]) -> None:
    run(tmp_path, data=points(50, batch_size=10), local_steps=100)
    sizes = torch.tensor([batch_size_of(batch) for batch in batches], dtype=torch.float64)
    # 200 binomials of 50 at .2: mean 10, variance 8; their estimates have errors √(8/200) = .2 and 8·√(2/200) = .8.
    assert abs(float(sizes.mean()) - 10) < 0.8
    assert abs(float(sizes.var()) - 8) < 3.2


def test_the_noise_of_a_step_has_its_stated_deviation_and_is_the_clients_own(tmp_path: Path) -> None:
    class Wide(LeastSquares):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(40_000))  # unused: nothing but noise reaches it

    made = run(tmp_path, noise=3.0, module=Wide())
    noise = weights(made)["bias"].double()
    std = 0.5 * 3.0 * 0.5 / 2 / math.sqrt(2)  # rate · z C / B, and the mean of two clients' own
    assert abs(float(noise.var()) / std**2 - 1) < 4 * math.sqrt(2 / len(noise))
    assert abs(float(noise.mean())) < 4 * std / math.sqrt(len(noise))


def test_no_two_steps_have_the_same_noise(tmp_path: Path) -> None:
    class Wide(LeastSquares):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(10_000))

    one = weights(run(tmp_path / "1", noise=1.0, module=Wide(), local_steps=1))["bias"].double()
    two = weights(run(tmp_path / "2", noise=1.0, module=Wide(), local_steps=2))["bias"].double() - one
    # Independent: the variance of the second step is the first's, and their correlation's error is 1/√10,000.
    assert abs(float((one @ two) / (one.norm() * two.norm()))) < 0.04
    assert abs(float(two.var() / one.var()) - 1) < 0.08


class Blobs(Points):
    """Three clients of 20 random samples and three classes."""

    num_classes = 3
    input_shape = (4,)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(3, **kwargs)
        self.batch_size = 6

    def load_arrays(self) -> Arrays:
        drawn = torch.Generator().manual_seed(0)
        x = torch.randn(60, 4, generator=drawn).numpy()
        y = torch.randint(3, (60,), generator=drawn).numpy()
        clients = torch.arange(3).repeat_interleave(20).numpy()
        return Arrays(x, y, x, y, clients, clients, "blobs")


def mlp() -> Classifier:
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)]
    return Classifier(torch.nn.Sequential(*layers), num_classes=3)


def test_without_clipping_and_noise_it_is_plain_descent_on_the_same_batches(tmp_path: Path, batches: list[Any]) -> None:
    """Not to the bit: a matrix product over a batch sums in another order than the exact sum of single gradients."""
    found = weights(run(tmp_path, 100.0, data=Blobs(), module=mlp(), local_epochs=2))
    assert len(batches) == 3 * 2 * 4, "⌈20 / 6⌉ batches a pass"
    ends = []
    for client in range(3):
        model = mlp()
        for x, y in batches[client * 8 : client * 8 + 8]:
            model.zero_grad()
            (torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / 6).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        ends.append(dict(model.state_dict()))
    for name, tensor in found.items():
        expected = torch.stack([end[name] for end in ends]).mean(0)
        assert torch.allclose(tensor, expected, rtol=0, atol=1e-6), name


def test_the_chunks_in_memory_change_rounding_only(tmp_path: Path) -> None:
    found = [
        weights(run(tmp_path / str(most), 0.3, data=Blobs(), module=mlp(), max_rounds=2, physical_batch=most))
        for most in (1, 4, 64)
    ]
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], rtol=0, atol=1e-6)
        assert torch.allclose(tensor, found[2][name], rtol=0, atol=1e-6)


def test_a_resumed_run_is_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", noise=1.0, data=Blobs(), module=mlp(), max_rounds=3)
    run(tmp_path / "parts", noise=1.0, data=Blobs(), module=mlp(), max_rounds=1)
    parts = run(tmp_path / "parts", noise=1.0, data=Blobs(), module=mlp(), max_rounds=3, ckpt_path="last")
    assert_same(weights(whole), weights(parts))
    assert whole.metrics["privacy/epsilon"] == parts.metrics["privacy/epsilon"]


def test_a_sample_without_a_finite_gradient_counts_as_none(tmp_path: Path) -> None:
    class Odd(LeastSquares):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return super().loss(batch) / torch.where(batch[1] == 2, 0.0, 1.0).mean()  # infinite for client 0

    made = run(tmp_path, module=Odd())
    assert weights(made)[W].tolist() == [[0.0, 0.125]]


def test_nothing_of_the_training_is_logged(tmp_path: Path) -> None:
    made = run(tmp_path)
    assert [name for name in made.metrics if name.startswith("train/")] == ["train/lr"]


def test_noise_is_worked_out_for_the_budget_and_who_has_spent_it_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Client 0 draws both samples in its one step a round, client 1 each of eight with ¼ in its four.
    parts: dict[str, Any] = {"data": points(2, 8, batch_size=2), "noise": None, "epsilon": 2.0}
    made = run(tmp_path, max_rounds=2, **parts)
    assert 1.99 < made.metrics["privacy/epsilon"] <= 2
    made = run(tmp_path, max_rounds=9, ckpt_path="last", **parts)
    told = capsys.readouterr().out
    assert "trainer.privacy: 1 clients have spent epsilon 2.0, and are left out from now on" in told
    assert "every client has spent epsilon 2.0 at delta 0.01; the run ends here" in told
    found = rows(made.run.log_dir / "metrics.csv")
    assert max(float(row["privacy/epsilon"]) for row in found) <= 2
    counts = [int(float(row["participation/count"])) for row in found]
    assert counts == sorted(counts, reverse=True)
    assert counts[:2] == [2, 2]
    assert counts[2] == 1, "one client has spent its budget before the other"
    assert len(found) < 9
    taken = account(made)[0]
    assert taken == [counts.count(2), len(counts)] or taken == [len(counts), counts.count(2)]


def test_each_client_is_charged_for_the_rounds_in_which_it_worked(tmp_path: Path) -> None:
    some = PoissonParticipation(0.4, dropout_before=0.3)
    made = run(tmp_path, noise=1.0, data=Blobs(), module=mlp(), max_rounds=6, participation=some,
               on_client_failure="skip")  # fmt: skip
    plans = [made.participation.plan(round_idx) for round_idx in range(6)]
    working = [one.client_id for plan in plans for one in plan if one.fate is not Fate.LOST_BEFORE]
    rounds = [working.count(client) for client in range(3)]
    assert account(made)[0] == rounds
    # ⌈20 / 6⌉ = 4 steps a round, in which each of 20 samples is drawn with .3.
    expected, _ = Mechanism("poisson", 20, 6, 1.0).epsilon({1: 4 * max(rounds)}, 0.01)
    assert made.metrics["privacy/epsilon"] == expected


def test_the_steps_of_every_phase_are_charged(tmp_path: Path) -> None:
    made = run(tmp_path, noise=1.0, data=Blobs(), module=mlp(), algorithm=Ditto(weighting="uniform"), local_epochs=2)
    expected, _ = Mechanism("poisson", 20, 6, 1.0).epsilon({1: 2 * 2 * 4}, 0.01)
    assert made.metrics["privacy/epsilon"] == expected


class Later(FedAvg):
    """Another phase from a client's second round on, or other epochs."""

    def __init__(self, epochs: int, wrapped: bool = False) -> None:
        super().__init__(weighting="uniform")
        self.epochs, self.wrapped = epochs, wrapped

    def phases(self, client: Client) -> list[Phase | Pass]:
        loader = client.train_loader()
        if client.is_new:
            return [Phase("train", loader, epochs=1)]
        return [Phase("train", chain(loader) if self.wrapped else loader, epochs=self.epochs)]


def test_the_phases_of_later_rounds_are_charged_from_the_first(tmp_path: Path) -> None:
    """Two clients of 4 samples in batches of 2: 2 steps in the first round, 6 later; each round is charged 6."""
    made = run(tmp_path, noise=1.0, data=points(4, batch_size=2), algorithm=Later(3), max_rounds=2)
    assert account(made)[2] == [6, 6]


def test_a_loader_of_ones_own_around_the_clients_data_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot go around Later: its 'train' reads a client's data beside the steps"):
        run(tmp_path, data=points(4, batch_size=2), algorithm=Later(1, wrapped=True), max_rounds=2)


def test_no_two_phases_of_a_round_draw_the_same_batches(tmp_path: Path, batches: list[Any]) -> None:
    run(tmp_path, noise=1.0, data=points(64, batch_size=8), algorithm=Ditto(weighting="uniform"))
    sizes = [batch_size_of(batch) for batch in batches]
    assert sizes[:8] != sizes[8:16]


def test_a_release_that_repeats_itself_costs_nothing_and_another_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: dict[str, Any] = {"noise": 1.0, "data": Blobs(), "key_file": str(tmp_path / "key"), "max_rounds": 2}
    parts["on_client_failure"] = "skip"
    run(tmp_path / "whole", module=mlp(), **parts)
    for name in ("again", "other"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
    parts |= {"max_rounds": 3, "ckpt_path": "last"}
    whole = run(tmp_path / "whole", module=mlp(), **parts)
    again = run(tmp_path / "again", module=mlp(), **parts)
    assert_same(weights(whole), weights(again))
    assert again.metrics["privacy/epsilon"] == whole.metrics["privacy/epsilon"]
    # With one gradient that is off in its last bits, all noise of that step is other noise.
    add = SampleGradients._add

    def off(self: SampleGradients, chunk: Any, count: int, sums: dict[str, Tensor]) -> None:
        add(self, chunk, count, sums)
        sums["network.1.bias"] += 1

    monkeypatch.setattr(SampleGradients, "_add", off)
    other = run(tmp_path / "other", module=mlp(), **parts)
    apart = weights(other)["network.3.weight"] - weights(whole)["network.3.weight"]
    assert apart.abs().min() > 1e-6, "no coordinate tells of the sum without noise"
    expected, _ = Mechanism("poisson", 20, 6, 1.0).epsilon({1: 2 * 4, 2: 4}, 0.01)
    assert other.metrics["privacy/epsilon"] == pytest.approx(expected, rel=1e-9)


def account(made: FederatedTrainer) -> list[list[int]]:
    """Rounds, samples and steps of each client, as a simulation's checkpoint has them."""
    found: list[int] = made.run.federation.server["around.privacy"]["_account"].tolist()
    assert found[:2] == [0, 0], "not concealed"
    return np.reshape(found[2:], (3, -1)).tolist()


def test_a_checkpoint_under_a_key_tells_nobody_else_who_took_part(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"noise": 1.0, "data": Blobs(), "max_rounds": 4, "on_client_failure": "skip"}
    key, parts["participation"] = tmp_path / "key", PoissonParticipation(0.5)
    made = run(tmp_path / "keyed", module=mlp(), key_file=str(key), **parts)
    path = made.run.log_dir / "checkpoints/last.ckpt"
    saved = torch.load(path, weights_only=True)["server"]["around.privacy"]["_account"].numpy()
    worked = [one.client_id for idx in range(4) for one in made.participation.plan(idx)]
    expected = [[worked.count(client) for client in range(3)], [20] * 3, [4] * 3]
    assert reveal(RunKey.of_file(key), saved).reshape(3, 3).tolist() == expected
    assert abs(saved).min() > 100, "each word is under a mask: below 101 with probability 1e-17"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"clip_norm": 0.0}, "clip_norm is 0"),
        ({"clip_norm": -1.0}, "clip_norm is -1"),
        ({"clip_norm": math.nan}, "clip_norm is nan"),
        ({"noise_multiplier": -0.1}, "noise_multiplier is -0.1"),
        ({"epsilon": 1.0}, "give exactly one"),
        ({"noise_multiplier": None}, "give exactly one"),
        ({"noise_multiplier": None, "epsilon": 0.0}, "epsilon is 0"),
        ({"delta": 0.0}, "delta is 0"),
        ({"delta": 1.0}, "delta is 1"),
        ({"physical_batch": 0}, "physical_batch is 0"),
    ],
)
def test_a_setting_out_of_its_range_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SampleLevel(**({"clip_norm": 1.0, "noise_multiplier": 1.0} | settings))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip_norm", "inf"), ("clip_norm", "1,0"), ("clip_norm", "null"), ("epsilon", "-inf"), ("epsilon", "eight"),
        ("epsilon", "nan"), ("delta", "1e-5x"), ("delta", "nan"), ("noise_multiplier", "[1]"),
        ("physical_batch", "1.5"), ("physical_batch", "-1"), ("withhold", "perhaps"), ("unit", "sample"),
        ("key_file", ""),
    ],
)  # fmt: skip
def test_a_bad_word_of_the_command_line_is_one_line_that_names_its_key(
    key: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["-c", str(ROOT / "configs/quickstart.yaml"), "-c", str(ROOT / "configs/privacy/sample_level.yaml")]
    words = [f"--trainer.privacy.init_args.{key}", value, "--trainer.default_root_dir", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main(["fit", *files, *words, "--trainer.on_client_failure", "skip"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert key in said


@pytest.mark.parametrize("level", [[SampleLevel(1.0, 1.0), ClientLevel(1.0, 1.0)], "SampleLevel", 1.0])
def test_both_levels_at_once_are_refused_by_name(level: Any, tmp_path: Path) -> None:
    says = (
        r"trainer\.privacy is \w+; it takes one level, ClientLevel or SampleLevel, as a run has one key and one account"
    )
    with pytest.raises(ConfigError, match=says):
        run(tmp_path, privacy=level)


def test_image_files_are_read_by_samples_that_are_drawn(
    tmp_path: Path, batches: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for client, name in product("ab", "xy"):
        (tmp_path / "data" / client / name).mkdir(parents=True)
        for idx in range(6):
            picture = np.full((4, 4), 40 * idx + 10 * (name == "y"), np.uint8)
            Image.fromarray(picture).save(tmp_path / "data" / client / name / f"{idx}.png")

    def images(batch_size: int) -> ClientFolders:
        return ClientFolders(root=str(tmp_path / "data"), image_size=4, grayscale=True, class_names=["x", "y"],
                             batch_size=batch_size)  # fmt: skip

    def network() -> Classifier:
        torch.manual_seed(0)
        return Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)), num_classes=2)

    whole = run(tmp_path / "whole", 1e3, data=images(4096), module=network(), local_steps=2)
    assert len({batch_size_of(batch) for batch in batches}) <= 2
    plain = run(tmp_path / "plain", data=images(4096), module=network(), local_steps=2, privacy=None)
    for name, tensor in weights(plain).items():
        assert torch.allclose(weights(whole)[name], tensor, rtol=0, atol=1e-5)
    batches.clear()
    run(tmp_path / "drawn", 1e3, data=images(2), module=network(), local_epochs=3)
    sizes = [batch_size_of(batch) for batch in batches]
    assert len(set(sizes)) > 2, "each sample is drawn by itself"
    assert {tuple(batch[0].shape[1:]) for batch in batches} == {(1, 4, 4)}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"algorithm": FedAvg()}, "weighs clients by their samples, which tells of each; set algorithm.weighting"),
        ({"algorithm": LocalOnly()}, "clients of LocalOnly send nothing"),
        ({"accumulate_grad_batches": 2}, "every batch of SampleLevel is a step with noise of its own"),
        ({"executor": "vectorized"}, "takes the gradient of every sample, of one client at a time; use sequential"),
        ({"data": points(2, batch_size=5000)}, "data.batch_size is 5000; SampleLevel sums up to 4096"),
        ({"participation": WeightedParticipation(2)}, "draws clients by their data"),
        ({"participation": Asynchronous(1, 1)}, "lets each client work in its own time"),
        ({"participation": FullParticipation(stragglers=Stragglers(1.0, late="next_round"))}, "set it to lost"),
        ({"module": Wanderer(), "data": points(4)}, "set trainer.buffers to local or server"),
        ({"module": Wanderer(), "data": points(4), "buffers": "local"}, "batch norm in 'network.1' mixes the samples"),
        ({"protocols": [CalibratedTest()]}, "for which clients send tensors past trainer.privacy"),
        ({"aggregation": Median()}, "trainer.aggregation looks at single updates"),
    ],
)
def test_what_cannot_be_bounded_is_refused_before_the_run(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        run(tmp_path, **settings)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"noise": 2.0}, "noise_multiplier is 2.0, and the run began with 1.0; keep it"),
        ({"clip_norm": 1.0}, "clip_norm is 1.0, and the run began with 0.5; keep it"),
        ({"delta": 0.02}, "delta is 0.02, and the run began with 0.01; keep it"),
        ({"local_epochs": 2}, "clients have other samples, batches or steps a round than the run began with"),
        ({"key_file": "new.key", "on_client_failure": "skip"}, "the noise of the run so far came from the seed"),
    ],
)
def test_a_run_goes_on_with_its_own_settings(
    changed: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(tmp_path, noise=1.0)
    with pytest.raises(ConfigError, match=says):
        run(tmp_path, **({"noise": 1.0, "max_rounds": 2, "ckpt_path": "last"} | changed))


def test_groups_are_left_for_one_client_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = weights(run(tmp_path / "1", noise=1.0))
    other = weights(run(tmp_path / "2", noise=1.0, executor="auto"))
    assert_same(one, other)
    assert "trains one client after the other: trainer.privacy takes the gradient of every" in capsys.readouterr().out


def test_the_card_says_what_is_promised_to_whom(tmp_path: Path) -> None:
    made = run(tmp_path, noise=1.0, data=Blobs(), module=mlp())
    card = (made.run.log_dir / "privacy.md").read_text()
    assert "for one sample of a client: neighbouring populations differ by the data of one sample replaced by" in card
    assert "| expected batch | 6 |" in card
    assert f"**ε = {made.metrics['privacy/epsilon']:.6g}**" in card
    assert "of updates before the sum was not private" not in card


def test_noise_is_worked_out_for_the_rounds_in_which_clients_will_work(tmp_path: Path) -> None:
    some = {"participation": UniformParticipation(1), "data": Blobs(), "noise": None, "epsilon": 3.0}
    made = run(tmp_path, module=mlp(), max_rounds=6, **some)
    assert 2.99 < made.metrics["privacy/epsilon"] <= 3
    most = max(account(made)[0])
    assert most < 6
    # calibrate's noise for its most rounds of 4 steps, at a rate of 6 / 20
    expected = calibrate("poisson", 20, 6, 4 * most, 3.0, 0.01)
    assert made.run.federation.server["around.privacy"]["noise_multiplier"] == pytest.approx(expected, rel=1e-3)


def test_a_round_that_spent_the_budget_can_be_run_again_after_a_kill(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"noise": None, "epsilon": 2.0, "data": points(2, 8, batch_size=2)}
    parts |= {"key_file": str(tmp_path / "key"), "on_client_failure": "skip"}
    run(tmp_path / "whole", **(parts | {"max_rounds": 3, "callbacks": [Stopping(2)]}))
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")  # as if the third round had ended before its checkpoint
    parts |= {"max_rounds": 3, "ckpt_path": "last"}
    whole, again = run(tmp_path / "whole", **parts), run(tmp_path / "killed", **parts)
    assert whole.run.next_round == again.run.next_round == 3
    assert_same(weights(whole), weights(again))
    assert 1.99 < whole.metrics["privacy/epsilon"] == again.metrics["privacy/epsilon"] <= 2


class Stopping(Callback):
    """Ends a run after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        run.should_stop = run.next_round == self.rounds
