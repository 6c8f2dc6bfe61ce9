"""Modules that know of no federation (`tests.strangers`) train in one, by configuration alone."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lit_fed.engine.loop.rounds as rounds_of_a_run
from lit_fed.data import Diabetes, Digits
from lit_fed.errors import ClientFailure
from lit_fed.methods import FedProx
from lit_fed.seeding import derive_seed, torch_generator
from tests import strangers
from tests.engine.stranger_support import STRANGERS, Backwards, digits, method, run
from tests.support import ROOT, assert_same, client_states, events_of, fit, rows, saved_weights, weights

AS_THEY_ARE = [
    "fedavg", "fedprox", "scaffold", "feddyn", "fednova", "fedexp", "fedavgm", "fedadam", "fedyogi", "fedadagrad",
    "client_momentum", "qfedavg", "afl", "ditto", "per_fedavg", "local_only",
]  # fmt: skip
WITH_A_HEAD = ["fedper", "fedrep", "fedbabu", "moon", "fedntd", "fedlc", "fedrs"]


def columns(folder: Path, prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in rows(folder / "metrics.csv")[-1] if name.startswith(prefix)}


# ---------------------------------------------------------------------- by configuration alone


@pytest.mark.parametrize("name", [*AS_THEY_ARE, *WITH_A_HEAD])
def test_a_strangers_module_learns_by_configuration_alone(cwd: Path, name: str) -> None:
    """With batch norm, metrics, a schedule and momentum; the loss of guessing one of ten digits is ln 10."""
    head = ["--algorithm.init_args.head", "classifier"] if name in WITH_A_HEAD else []
    folder = run("Net", *method(name), *head, rounds=3)
    last = rows(folder / "metrics.csv")[-1]
    assert float(last["train/loss"]) < math.log(10)
    assert columns(folder, "train/") >= {"loss", "acc", "opened"}
    statistics = ("mean", "std", "p10", "min", "worst", "worst10", "weighted")
    assert columns(folder, "clients/") == {
        f"{metric}_{over}" for metric in ("loss", "acc", "f1") for over in statistics
    }
    has_global = name not in ("local_only", "fedper", "fedrep")
    assert columns(folder, "global/") == ({"loss", "acc", "f1"} if has_global else set())


@pytest.mark.parametrize(
    ("module", "trains", "tests"),
    [
        ("RegressionNet", {"loss"}, {"mse", "mae"}),
        ("Net", {"loss", "acc", "opened"}, {"loss", "acc", "f1"}),
        ("DictNet", {"loss", "confidence", "surprise", "opened"}, {"loss", "acc", "f1"}),
        ("Terse", {"loss"}, {"error"}),
        ("Nested", {"loss"}, {"error"}),
        ("Curious", {"loss", "progress", "steps", "seen", "lr"}, {"error"}),
        ("Meddler", {"loss"}, {"error"}),
        ("LatentGAN", {"judge", "forge", "lr"}, {"distance"}),
        ("Fixed", {"loss", "batches"}, {"error"}),
    ],
)
def test_what_it_logs_has_the_same_names_everywhere(cwd: Path, module: str, trains: set[str], tests: set[str]) -> None:
    folder = run(module, "--trainer.logger", "true")
    assert columns(folder, "train/") == trains | {"lr"}
    assert columns(folder, "global/") == tests
    events = EventAccumulator(events_of(folder)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {f"train/{name}" for name in trains} | {f"global/{name}" for name in tests} <= tags
    assert ("stranger/progress" in tags) == (module == "Curious")


def test_counters_of_a_hook_count_every_client_and_evaluation(tmp_path: Path) -> None:
    module = strangers.Net()
    data = Digits(num_clients=3, max_train_samples=120)
    fit(tmp_path, module, data, max_rounds=2, local_epochs=2)
    # Three clients in two rounds, two epochs each; each round the global model once and each client's once.
    assert module.epochs_seen == {"train": 12, "val": 0, "test": 8}
    assert module.opened == 12


# ---------------------------------------------------------------------- the same as in Lightning


def both(tmp_path: Path, module: Any, data: Any, **settings: Any) -> tuple[Any, lightning.Trainer, Any]:
    """One client's round in a federation, and an epoch of Lightning's own trainer on the same batches."""

    class Epochs(type(module)):  # type: ignore[misc]  # a class that is known at run time
        """Shows the means over its epoch, as a federation does, and not the last batch's values."""

        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **{**kwargs, "on_step": False, "on_epoch": True})

    twin = Epochs(**dict(module.hparams))
    twin.load_state_dict(module.state_dict())
    made = fit(tmp_path / "federation", module, data, max_rounds=1, **settings)

    class Seeded(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            torch.manual_seed(derive_seed(0, "train", 0, 0, "training"))

        def on_test_start(self, trainer: Any, pl_module: Any) -> None:
            torch.manual_seed(derive_seed(0, "evaluation"))

    plain = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=[Seeded()],
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, num_sanity_val_steps=0,
        **settings,
    )  # fmt: skip
    plain.fit(twin, data.train_loader(0, torch_generator(0, "train", 0, 0, "data")))
    return made, plain, twin


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (lambda: strangers.RegressionNet(), {}),
        (lambda: strangers.Net(), {}),
        (lambda: strangers.Net(interval="step"), {}),
        (lambda: strangers.Net(), {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
        (lambda: strangers.DictNet(), {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (lambda: strangers.Terse(), {}),
        (lambda: strangers.Nested(), {}),
        (lambda: strangers.Meddler(), {}),
        (lambda: strangers.LatentGAN(), {}),
        (lambda: strangers.Fixed(), {}),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_clients_round_is_an_epoch_of_lightnings_own_trainer(
    tmp_path: Path, module: Any, settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    one = module()
    regression = isinstance(one, strangers.RegressionNet)
    kind: Any = Diabetes if regression else Digits
    data = kind(num_clients=1, batch_size=16, **({} if regression else {"max_train_samples": 100}))
    made, plain, twin = both(tmp_path, one, data, **settings)
    assert_same(weights(made), {name: twin.state_dict()[name] for name in weights(made)})
    logged = {
        name.removeprefix("train/").removeprefix("train_"): float(v) for name, v in plain.callback_metrics.items()
    }
    ours = {name.removeprefix("train/"): value for name, value in made.metrics.items() if name.startswith("train/")}
    for name, value in logged.items():
        assert ours[name] == pytest.approx(value, rel=1e-6), name
    assert getattr(one, "calls", None) == getattr(twin, "calls", None)
    tests = isinstance(one, strangers.Net | strangers.LatentGAN)
    [found] = (plain.test if tests else plain.validate)(twin, data.test_loader(), verbose=False)
    for name, value in found.items():
        mine = made.metrics[f"global/{name.removeprefix('test/').removeprefix('val_')}"]
        assert mine == pytest.approx(value, rel=1e-6), name


PLAIN = """
import sys
mode = sys.argv[1]
import lightning, numpy, torch
from sklearn.datasets import load_digits
import strangers_in_cwd
torch.set_num_threads(1)
torch.manual_seed(0)
module = strangers_in_cwd.Net()
if mode == "after":
    import copy
    from lit_fed import FederatedTrainer
    from lit_fed.data import Digits
    from lit_fed.methods import Scaffold
    first, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    FederatedTrainer("cpu", 1, max_rounds=1, logger=False, enable_progress_bar=False, num_threads=1).fit(
        module, Digits(num_clients=3, max_train_samples=100), Scaffold()
    )
    module.load_state_dict(first)
    torch.set_rng_state(state)
digits = load_digits()
x, y = torch.tensor(digits.images[:300, None] / 16, dtype=torch.float32), torch.tensor(digits.target[:300])
batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=50)
trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
trainer.fit(module, batches, batches)
assert ("lit_fed" in sys.modules) == (mode == "after")
print({name: value.item() for name, value in trainer.callback_metrics.items()})
print([tensor.double().sum().item() for tensor in module.state_dict().values()])
"""


@pytest.mark.long
def test_a_plain_trainer_gives_the_same_without_us_and_after_us(cwd: Path) -> None:
    outputs = []
    for mode in ("without", "after"):
        command = [sys.executable, "-W", "ignore", "-c", PLAIN, mode]
        env = {"PYTHONPATH": f"{ROOT}:{cwd}", "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.strip().splitlines()[-2:])
    assert "train/loss" in outputs[0][0]
    assert outputs[0] == outputs[1]


# ---------------------------------------------------------------------- resumed, in parts, in another order


def interrupted(run_round: Any, at: int) -> Any:
    def run(current: Any, round_idx: int) -> None:
        if round_idx == at:
            raise KeyboardInterrupt
        run_round(current, round_idx)

    return run


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("Net", "scaffold"),
        ("Net", "ditto"),
        ("Net", "fedadam"),
        ("Net", "fedper"),
        ("Net", "moon"),
        ("DictNet", "feddyn"),
        ("RegressionNet", "fedavgm"),
        ("Terse", "per_fedavg"),
        ("Nested", "fedyogi"),
        ("Curious", "fedprox"),
        ("Meddler", "fednova"),
        ("LatentGAN", "fedavg"),
        ("LatentGAN", "feddyn"),
        ("Fixed", "fedexp"),
    ],
)
def test_resumed_is_uninterrupted_to_the_bit(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    head = ["--algorithm.init_args.head", "classifier"] if name in WITH_A_HEAD else []
    words = [*method(name), *head, "--trainer.logger", "true"]
    whole = run(module, *words, rounds=4, folder="whole")
    with monkeypatch.context() as patched:
        patched.setattr(rounds_of_a_run, "run_round", interrupted(rounds_of_a_run.run_round, 2))
        with pytest.raises(SystemExit):
            run(module, *words, rounds=4, folder="parts")
    parts = run(module, *words, "--ckpt_path", "last", rounds=4, folder="parts")
    assert_same(saved_weights(whole), saved_weights(parts))
    servers = [torch.load(one / "checkpoints/last.ckpt", weights_only=True)["server"] for one in (whole, parts)]
    torch.testing.assert_close(*servers, rtol=0, atol=0)
    torch.testing.assert_close(client_states(whole), client_states(parts), rtol=0, atol=0)
    for one, other in zip(rows(whole / "metrics.csv"), rows(parts / "metrics.csv"), strict=True):
        for key in one:
            assert key.startswith("time/") or one[key] == other[key], key


@pytest.mark.parametrize("kind", STRANGERS)
def test_no_client_sees_what_another_left_in_a_module(tmp_path: Path, kind: Any) -> None:
    """In metrics, buffers, optimizers, modes, schedules or generators: the order of clients changes nothing."""
    found = []
    for participation in (None, Backwards()):
        torch.manual_seed(0)
        found.append(fit(tmp_path, kind(), digits(), participation=participation, logger=True))
    assert_same(weights(found[0]), weights(found[1]))
    values = [
        {
            (row["round"], row["client_id"], row["stage"], row["metric"]): row["value"]
            for row in rows(one.log_dir / "clients.csv")
        }
        for one in found
    ]
    assert values[0].keys() == values[1].keys()
    assert all(value == values[1][key] for key, value in values[0].items() if "time" not in key[3])


def test_buffers_that_are_not_saved_begin_anew_with_every_client(tmp_path: Path) -> None:
    made = fit(tmp_path, strangers.Fixed(), digits(), max_rounds=2, local_epochs=2)
    seen = {float(r["value"]) for r in rows(made.log_dir / "clients.csv") if r["metric"] == "train/batches"}
    assert seen == {4.0}  # 30 samples in batches of 20 are 2, two epochs


def test_what_a_module_does_not_train_neither_moves_nor_travels(tmp_path: Path) -> None:
    module = strangers.Fixed()
    before = module.features.weight.clone()
    made = fit(tmp_path, module, digits(), FedProx(mu=0.1), max_rounds=1)
    assert torch.equal(module.features.weight, before)
    assert not module.features.weight.requires_grad
    assert all(parameter.requires_grad for parameter in module.net.parameters())
    sent = float(rows(made.log_dir / "metrics.csv")[-1]["comm/uplink_bytes"])
    assert sent == 3 * 4 * (32 * 10 + 10)  # three clients, float32, the layer that trains


def test_what_a_hook_freezes_does_not_move(tmp_path: Path) -> None:
    class Later(strangers.Fixed):
        def __init__(self) -> None:
            super().__init__()
            self.features.requires_grad_(True)

        def on_train_start(self) -> None:
            self.features.requires_grad_(self.current_epoch >= 1)

    module = Later()
    before = module.features.weight.clone()
    made = fit(tmp_path, module, digits(), max_rounds=1)
    assert torch.equal(weights(made)["features.weight"], before)
    assert not torch.equal(weights(fit(tmp_path, Later(), digits(), max_rounds=2))["features.weight"], before)


def test_a_module_that_fails_names_the_client_and_leaves_the_others_alone(tmp_path: Path) -> None:
    class Fails(strangers.Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.current_epoch == 1 and self.opened == 5:
                self.train_acc(torch.randn(len(batch[0]), 10), batch[1])
                raise ValueError("a pixel is missing")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ClientFailure, match="client 1 failed in round 1: ValueError: a pixel is missing"):
        fit(tmp_path, Fails(), digits())
    skipping = fit(tmp_path, Fails(), digits(), on_client_failure="skip")
    plain = fit(tmp_path, strangers.Net(), digits())
    accuracy = [
        {
            r["client_id"]: r["value"]
            for r in rows(made.log_dir / "clients.csv")
            if r["metric"] == "train/acc" and r["round"] == "1"
        }
        for made in (skipping, plain)
    ]
    assert accuracy[0].keys() == {"0", "2"}
    assert all(0 <= float(value) <= 1 for value in accuracy[0].values())
