"""Every configuration says what it is, parses with the quickstart below it, and runs where it needs no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fed.command.cli import main
from lit_fed.studies.cells import lay_out
from lit_fed.studies.reported import check_metrics
from lit_fed.studies.parts import check_parts
from lit_fed.studies.study import read_study
from tests.support import ROOT, rows

CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
STUDIES = sorted((CONFIGS / "studies").glob("*.yaml"))  # no runs, but grids of them
PROFILES = [(path, profile) for path in STUDIES for profile in yaml.safe_load(path.read_text("utf-8"))["profiles"]]
# Nor are these: what `cli.py cost` and `cli.py simulate` read, see tests/test_cost.py and tests/simulations.
OTHER = [
    *(CONFIGS / "experiment" / "fedfrozen").glob("figure?.yaml"),
    CONFIGS / "experiment/fedfrozen/table2.yaml",
    CONFIGS / "experiment/uwa_communication.yaml",
]
ALL = [path for path in sorted(CONFIGS.rglob("*.yaml")) if path not in (*STUDIES, *OTHER)]
COMPLETE = ("experiment", "feddr_plus", "fedfrozen", "configs")
SHORT = ("--trainer.max_rounds", "1", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false")
SMALL = ("--model.init_args.local_epochs", "null", "--model.init_args.local_steps", "1")


def name(path: Path) -> str:
    return path.relative_to(CONFIGS).with_suffix("").as_posix()


def parsed(capsys: Any, *paths: Path) -> dict[str, Any]:
    """What a command with these files would run with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["fit", *(word for path in paths for word in ("-c", str(path))), "--print_config"])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.err) == (0, "")
    content: dict[str, Any] = yaml.safe_load(captured.out)
    return content


def contains(whole: Any, part: Any) -> bool:
    """Whether each setting of a file has arrived; classes may be named with or without their module."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part or (isinstance(whole, str) and isinstance(part, str) and whole.endswith(f".{part}"))


@pytest.mark.parametrize("path", ALL, ids=name)
def test_says_what_it_is_and_parses_on_top_of_the_quickstart(path, capsys):
    text = path.read_text(encoding="utf-8")
    first = text.splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    content = parsed(capsys, QUICKSTART, path)
    assert contains(content, yaml.safe_load(text)), "a setting was dropped"
    assert all(content[key]["class_path"] for key in ("model", "data", "algorithm"))


@pytest.mark.parametrize("path", [p for p in ALL if p.parent.name in COMPLETE], ids=name)
def test_an_experiment_is_complete_by_itself(path, capsys):
    content = parsed(capsys, path)
    schedule = content["model"]["init_args"]["lr_scheduler"]
    assert schedule is None or schedule["init_args"].get("T_max") in (None, content["trainer"]["max_rounds"])


RUNNABLE = [
    *(CONFIGS / "participation").glob("*.yaml"),
    *(CONFIGS / "data").glob("digits_*.yaml"),
    *(CONFIGS / "method").glob("*.yaml"),
    *(CONFIGS / "network").glob("*.yaml"),
    CONFIGS / "trainer" / "cpu.yaml",
    QUICKSTART,
]


@pytest.mark.parametrize("path", sorted(RUNNABLE), ids=name)
def test_runs_a_round_on_embedded_data(path, tmp_path, capsys):
    # A network of millions of parameters need not be tested on every client.
    few = ("--trainer.participation.init_args.count", "1", "--trainer.evaluate_every", "0")
    options = [*SHORT, *SMALL, *(few if path.parent.name == "network" else ())]
    main(["fit", "-c", str(QUICKSTART), "-c", str(path), *options, "--trainer.default_root_dir", str(tmp_path)])
    assert capsys.readouterr().err == ""
    assert len(rows(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")) == 1


def test_methods_and_data_compose_because_they_set_different_things():
    sets = {"method": {"model", "algorithm"}, "data": {"data"}, "network": {"model"}, "participation": {"trainer"}}
    for folder, keys in sets.items():
        for path in (CONFIGS / folder).glob("*.yaml"):
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            protocols = content.pop("trainer", None) if folder == "method" else None
            if folder == "method":  # a public set and calibration samples are a method's need, not a data set's nature
                needs = content.pop("data", {"init_args": {}})
                assert needs.keys() == {"init_args"}, path
                assert needs["init_args"].keys() <= {"public_size", "calibration_fraction"}, path
            assert set(content) <= keys, path
            assert protocols is None or set(protocols) == {"protocols"}, path


TUNED = sorted((CONFIGS / "experiment" / "feddr_plus" / "tuned").glob("digits_*.yaml"))


@pytest.mark.parametrize("path", [CONFIGS / "method" / "fedavg.yaml", *TUNED], ids=name)
def test_the_pocket_experiment_runs_with_every_tuned_method(path, tmp_path, capsys):
    files = ["-c", str(CONFIGS / "experiment" / "feddr_plus" / "digits.yaml"), "-c", str(path)]
    main(["fit", *files, *SHORT, *SMALL, "--trainer.evaluate_every", "0", "--trainer.default_root_dir", str(tmp_path)])
    assert capsys.readouterr().err == ""
    (row,) = rows(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
    assert -1 <= float(row["alignment/observed"]) <= 1


FEDFROZEN = CONFIGS / "experiment" / "fedfrozen"
BASELINES = ["fedavg", "fedprox", "scaffold", "fedavgm", "fedadam", "fednova"]


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "femnist"])
@pytest.mark.parametrize("method", [*BASELINES, "fedfrozen"])
def test_settings_of_fedfrozens_table_5(data, method, capsys):
    tuned = [FEDFROZEN / "tuned" / f"{prefix}{method}.yaml" for prefix in (f"{data}_", "")]
    over = [path for path in tuned if path.exists()][:1] or [CONFIGS / "method" / f"{method}.yaml"]
    content = parsed(capsys, FEDFROZEN / f"{data}.yaml", *over)
    model, server = content["model"]["init_args"], content["algorithm"]["init_args"]
    assert (content["trainer"]["max_rounds"], model["local_epochs"], content["trainer"]["seed"]) == (10, 10, 42)
    sizes = content["data"]["init_args"]
    assert (sizes["max_train_samples"], sizes["max_test_samples"]) == (5000, 2000)
    assert (sizes["num_clients"], sizes["batch_size"]) == {"cifar100": (20, 32), "femnist": (10, 64)}.get(
        data, (10, 32)
    )
    assert model["network"] == ("vit_small_patch16_224" if data == "femnist" else "vit_base_patch32_224")
    optimizer = model["optimizer"]["init_args"]
    if method == "scaffold":
        expected = (0.1, 0.0) if data == "cifar10" else (0.003, 0.9)
        assert (optimizer["lr"], optimizer["momentum"], optimizer["weight_decay"]) == (*expected, 0.0)
    else:
        assert (optimizer["lr"], optimizer["weight_decay"]) == (1e-4, 0.01)
    if method == "fedprox":
        assert model["mu"] == 0.01
    if method == "fedfrozen":
        assert model["warmup_rounds"] == (3 if data == "cifar100" else 5)
    if method in ("fedavgm", "fednova"):
        assert server["server_lr"] == 1.0
    if method == "fedavgm":
        assert server["beta"] == 0.9
    if method == "fedadam":  # FEMNIST: the file says what to change
        assert (server["server_lr"], server["beta1"], server["beta2"], server["tau"]) == (1e-3, 0.9, 0.99, 1e-3)


@pytest.mark.parametrize("method", [*BASELINES, "fedfrozen"])
def test_the_pocket_transformer_runs_with_every_method(method, tmp_path, capsys):
    path = FEDFROZEN / "tuned" / f"{method}.yaml"
    over = path if path.exists() else CONFIGS / "method" / f"{method}.yaml"
    files = ["-c", str(FEDFROZEN / "digits.yaml"), "-c", str(over)]
    main(["fit", *files, *SHORT, *SMALL, "--trainer.evaluate_every", "0", "--trainer.default_root_dir", str(tmp_path)])
    assert capsys.readouterr().err == ""


def test_a_method_keeps_the_settings_below_it(capsys):
    base = parsed(capsys, QUICKSTART)["model"]
    prox = parsed(capsys, QUICKSTART, CONFIGS / "method" / "fedprox.yaml")["model"]
    assert prox["class_path"] == "lit_fed.methods.FedProx"
    assert prox["init_args"] == base["init_args"] | {"mu": 0.01}
    again = parsed(capsys, QUICKSTART, CONFIGS / "method" / "fedprox.yaml", CONFIGS / "method" / "fedavg.yaml")
    assert again["model"] == base


def test_a_network_leaves_nothing_of_the_one_below_it(capsys):
    folder = CONFIGS / "network"
    content = parsed(capsys, QUICKSTART, folder / "mlp.yaml", folder / "small_cnn.yaml")["model"]["init_args"]
    assert (content["network"], content["network_args"]) == ("small_cnn", {"width": 16})


def test_every_study_has_the_two_profiles_of_the_readme():
    assert all({(path, "paper"), (path, "pocket")} <= set(PROFILES) for path in STUDIES)


@pytest.mark.parametrize(("path", "profile"), PROFILES, ids=lambda part: part if isinstance(part, str) else name(part))
def test_a_study_says_what_it_is_and_all_of_its_cells_parse(path, profile, tmp_path, monkeypatch):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith((".", "?"))
    monkeypatch.chdir(ROOT)  # the files that it names are relative to the working directory
    grid = lay_out(read_study(path.relative_to(ROOT), profile), tmp_path)
    check_metrics(grid)
    assert grid.cells
    if profile == "pocket":
        check_parts(grid.cells)  # on data that need no file


def test_no_configuration_names_a_folder_of_one_machine():
    for path in [*ALL, *STUDIES, *OTHER]:
        assert ": /" not in path.read_text(encoding="utf-8")
