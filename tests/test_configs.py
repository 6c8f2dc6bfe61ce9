"""Every configuration says what it is, parses with the quickstart below it, and runs where it needs no files."""

from __future__ import annotations

import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fed.command.cli import main
from lit_fed.studies.file.study import read_study
from lit_fed.studies.running.cells import lay_out
from lit_fed.studies.running.parts import check_metrics, check_parts
from tests.support import ROOT, rows

CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
PAPERS = CONFIGS / "papers"
PUPPETS = PAPERS / "raf" / "runs" / "puppets.yaml"
EVERY = sorted(CONFIGS.rglob("*.yaml"))
STUDIES = sorted(PAPERS.glob("*/studies/*.yaml"))  # no runs, but grids of them
PROFILES = [(path, profile) for path in STUDIES for profile in yaml.safe_load(path.read_text("utf-8"))["profiles"]]
# Nor are these: what `cli.py simulate` and `cli.py cost` read, see tests/simulations and tests/test_cost.py.
OTHER = [path for path in EVERY if path.parent.name in ("simulations", "costs")]
ALL = [path for path in EVERY if path not in (*STUDIES, *OTHER)]
COMPLETE = [path for path in ALL if path.parent.name == "runs" or path == QUICKSTART]
SHORT = ("--trainer.max_rounds", "1", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false")
SMALL = ("--trainer.local_epochs", "null", "--trainer.local_steps", "1")


def name(path: Path) -> str:
    return path.relative_to(CONFIGS).with_suffix("").as_posix()


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------------- the files by themselves


class _Strict(yaml.SafeLoader):
    """YAML lets a mapping name a key twice, and keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"a key twice, from line {node.start_mark.line + 1} on: {keys}"
        return super().construct_mapping(node, deep)


def test_every_key_is_named_once() -> None:
    for mapping in ("a: 1\na: 2", "a: {b: 1, b: 2}"):
        with pytest.raises(AssertionError, match="a key twice"):
            yaml.load(mapping, _Strict)
    for path in EVERY:
        assert isinstance(yaml.load(path.read_text(encoding="utf-8"), _Strict), dict), path


@pytest.mark.parametrize("path", EVERY, ids=name)
def test_says_what_it_is(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith((".", "?"))


def test_every_file_that_is_named_exists() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (*EVERY, *CONFIGS.rglob("*.md"))}
    named = {(path, word) for path, text in texts.items() for word in re.findall(r"configs/[\w./+-]+\.yaml", text)}
    assert named
    assert [(str(path), word) for path, word in sorted(named) if not (ROOT / word).is_file()] == []


def test_no_configuration_names_a_folder_of_one_machine() -> None:
    for path in EVERY:
        assert ": /" not in path.read_text(encoding="utf-8")


def test_a_paper_has_its_files_in_folders_by_what_reads_them() -> None:
    reads = {"runs": "trainer", "tuned": "algorithm", "studies": "profiles", "simulations": "simulate", "costs": "cost"}
    for path in PAPERS.rglob("*.yaml"):
        assert path.parent.parent.parent == PAPERS
        assert reads[path.parent.name] in load(path), path


def keys(content: Any, depth: int) -> set[str]:
    """The dotted keys of nested mappings down to a depth; classes change nothing about where a setting lies."""
    if depth == 0 or not isinstance(content, dict):
        return {""}
    return {f"{key}.{rest}".rstrip(".") for key, value in content.items() for rest in keys(value, depth - 1)}


def test_parts_set_different_keys_so_that_their_order_does_not_matter() -> None:
    parts = {
        "method": {"algorithm"},
        "data": {"data"},
        "network": {"model.init_args.network", "model.init_args.network_args", "model.init_args.adapter"},
        "evaluation": {"trainer.protocols"},
        "participation": {"trainer.participation"},
        "aggregation": {"trainer.aggregation"},
        "trainer": {"trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy"}
        | {"trainer.precision", "trainer.num_threads"},
    }
    for folder, allowed in parts.items():
        depth = max(key.count(".") + 1 for key in allowed)
        for path in (CONFIGS / folder).glob("*.yaml"):
            assert keys(load(path), depth) <= allowed, path
    for path in PAPERS.glob("*/tuned/*.yaml"):
        content = load(path)
        content.pop("algorithm")
        assert keys(content, 3) <= {"model.init_args.optimizer"}, path


def test_every_study_has_the_two_profiles_of_the_readme() -> None:
    assert all({(path, "paper"), (path, "pocket")} <= set(PROFILES) for path in STUDIES)


# ---------------------------------------------------------------------- parsed


def parsed(capsys: Any, *paths: Path) -> dict[str, Any]:
    """What a command with these files would run with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["fit", *(word for path in paths for word in ("-c", str(path))), "--print_config"])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.err) == (0, "")
    assert "lit_fed.engine" not in captured.out, "what is printed names where users import from"
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
def test_parses_on_top_of_the_quickstart(path, capsys):
    content = parsed(capsys, QUICKSTART, path)
    assert contains(content, load(path)), "a setting was dropped"
    assert all(content[key]["class_path"] for key in ("model", "data", "algorithm"))


@pytest.mark.parametrize("path", COMPLETE, ids=name)
def test_a_run_is_complete_by_itself(path, capsys):
    content = parsed(capsys, path)
    schedule = content["model"]["init_args"]["lr_scheduler"]
    assert schedule is None or schedule["init_args"].get("T_max") is None, "its length would stay with other rounds"


def test_every_class_that_a_configuration_can_name_is_printed_by_its_public_path(tmp_path, capsys):
    trainer = {
        "participation": {"class_path": "WeightedParticipation", "init_args": {"count": 2}},
        "protocols": ["GlobalTest", "PersonalTest", "LocalTest"],
        "callbacks": ["Recorder", "EarlyStopping"],
        "uplink_codec": "CastCodec",
    }
    path = tmp_path / "named.yaml"
    path.write_text(yaml.safe_dump({"trainer": trainer}), encoding="utf-8")
    content = parsed(capsys, QUICKSTART, path)["trainer"]
    assert content["participation"]["class_path"] == "lit_fed.participation.WeightedParticipation"
    assert [one["class_path"] for one in content["protocols"]] == [
        f"lit_fed.protocols.{name}" for name in ("GlobalTest", "PersonalTest", "LocalTest")
    ]
    assert [one["class_path"] for one in content["callbacks"]] == [
        f"lit_fed.callbacks.{name}" for name in ("Recorder", "EarlyStopping")
    ]
    assert content["uplink_codec"]["class_path"] == "lit_fed.codecs.CastCodec"


@pytest.mark.parametrize("method", ["fedprox", "suwa", "fedfrozen"])
def test_data_method_and_network_come_to_the_same_in_any_order(method, capsys):
    parts = (
        CONFIGS / "method" / f"{method}.yaml",
        CONFIGS / "data" / "digits_shards.yaml",
        CONFIGS / "network" / "vit_pocket.yaml",
    )
    first, *others = [parsed(capsys, QUICKSTART, *order) for order in permutations(parts)]
    assert all(contains(first, load(path)) for path in parts)
    assert all(other == first for other in others)


def test_a_method_leaves_the_settings_below_it_and_the_next_one_nothing_of_it(capsys):
    base = parsed(capsys, QUICKSTART)
    prox = parsed(capsys, QUICKSTART, CONFIGS / "method" / "fedprox.yaml")
    assert prox["algorithm"]["class_path"] == "lit_fed.methods.FedProx"
    assert prox["algorithm"]["init_args"] == base["algorithm"]["init_args"] | {"mu": 0.01}
    assert {**prox, "algorithm": None} == {**base, "algorithm": None}
    assert base == parsed(capsys, QUICKSTART, CONFIGS / "method" / "fedprox.yaml", CONFIGS / "method" / "fedavg.yaml")


def test_a_network_leaves_nothing_of_the_one_below_it(capsys):
    folder = CONFIGS / "network"
    content = parsed(capsys, QUICKSTART, folder / "mlp.yaml", folder / "small_cnn.yaml")["model"]["init_args"]
    assert (content["network"], content["network_args"]) == ("small_cnn", {"width": 16})


FEDFROZEN = PAPERS / "fedfrozen"
BASELINES = ["fedavg", "fedprox", "scaffold", "fedavgm", "fedadam", "fednova"]


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "femnist"])
@pytest.mark.parametrize("method", [*BASELINES, "fedfrozen"])
def test_settings_of_fedfrozens_table_5(data, method, capsys):
    tuned = [FEDFROZEN / "tuned" / f"{prefix}{method}.yaml" for prefix in (f"{data}_", "")]
    over = [path for path in tuned if path.exists()][:1] or [CONFIGS / "method" / f"{method}.yaml"]
    content = parsed(capsys, FEDFROZEN / "runs" / f"{data}.yaml", *over)
    trainer, model, algorithm = content["trainer"], content["model"]["init_args"], content["algorithm"]["init_args"]
    assert (trainer["max_rounds"], trainer["local_epochs"], trainer["seed"]) == (10, 10, 42)
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
        assert algorithm["mu"] == 0.01
    if method == "fedfrozen":
        assert algorithm["warmup_rounds"] == (3 if data == "cifar100" else 5)
    if method in ("fedavgm", "fednova"):
        assert algorithm["server_lr"] == 1.0
    if method == "fedavgm":
        assert algorithm["beta"] == 0.9
    if method == "fedadam":  # FEMNIST: the file says what to change
        settings = (algorithm["server_lr"], algorithm["beta1"], algorithm["beta2"], algorithm["tau"])
        assert settings == (1e-3, 0.9, 0.99, 1e-3)


@pytest.mark.long
@pytest.mark.parametrize(("path", "profile"), PROFILES, ids=lambda part: part if isinstance(part, str) else name(part))
def test_all_cells_of_a_study_parse(path, profile, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # the files that it names are relative to the working directory
    grid = lay_out(read_study(path.relative_to(ROOT), profile), tmp_path)
    check_metrics(grid)
    assert grid.cells
    if profile == "pocket":
        check_parts(grid.cells)  # on data that need no file


# ---------------------------------------------------------------------- run


RUNNABLE = [
    *(CONFIGS / "evaluation").glob("*.yaml"),
    *(CONFIGS / "participation").glob("*.yaml"),
    *(CONFIGS / "data").glob("digits_*.yaml"),
    *(CONFIGS / "method").glob("*.yaml"),
    *(CONFIGS / "network").glob("*.yaml"),
    *(CONFIGS / "aggregation").glob("*.yaml"),
    *(CONFIGS / "attack").glob("*.yaml"),
    *(CONFIGS / "privacy").glob("*.yaml"),
    *PAPERS.glob("*/tuned/quickstart_*.yaml"),
    CONFIGS / "trainer" / "cpu.yaml",
    QUICKSTART,
    PUPPETS,
]
ON_PUPPETS = {CONFIGS / "method" / "raf.yaml", PUPPETS, *(CONFIGS / "network").glob("pose_*.yaml")}
FEW_PUPPETS = tuple(
    word
    for key, value in {
        "clients_per_level": "null",
        "num_clients": "2",
        "samples_per_client": "4",
        "test_samples": "4",
        "resolutions": "[[128, 96], [64, 32]]",  # of which 32 pixels are the smallest patch of these networks
        "test_resolutions": "[[96, 64]]",
    }.items()
    for word in (f"--data.init_args.{key}", value)
)
TRANSFORMER = CONFIGS / "network" / "vit_pocket.yaml"
ADAPTERS = CONFIGS / "network" / "lora.yaml"
NEEDS = {
    CONFIGS / "method" / "fedbn.yaml": (CONFIGS / "network" / "resnet18_cifar.yaml",),  # batch norm
    CONFIGS / "method" / "fedfrozen.yaml": (TRANSFORMER,),  # attention
    ADAPTERS: (TRANSFORMER,),  # layers below the head
    **{
        CONFIGS / "method" / f"{name}.yaml": (TRANSFORMER, ADAPTERS)
        for name in ("fedex_lora", "fedit", "fedsa_lora", "ffa_lora", "flora", "hetlora")
    },
}


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(RUNNABLE), ids=name)
def test_runs_a_round_on_embedded_data(path, tmp_path, capsys):
    if path.parent.name == "privacy":
        pytest.importorskip("dp_accounting")
    start = PUPPETS if path in ON_PUPPETS else QUICKSTART
    files = [word for file in (start, *NEEDS.get(path, ()), path) for word in ("-c", str(file))]
    # A network of millions of parameters need not be tested on every client.
    few = ("--trainer.participation.init_args.count", "1", "--trainer.evaluate_every", "0")
    few = FEW_PUPPETS if path in ON_PUPPETS else few if path.parent.name == "network" else ()
    options = [*SHORT, *SMALL, *few]
    main(["fit", *files, *options, "--trainer.default_root_dir", str(tmp_path)])
    assert capsys.readouterr().err == ""
    assert len(rows(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")) == 1


FEDDR_PLUS = PAPERS / "feddr_plus"
TUNED = sorted((FEDDR_PLUS / "tuned").glob("digits_*.yaml"))


@pytest.mark.parametrize("path", [CONFIGS / "method" / "fedavg.yaml", *TUNED], ids=name)
def test_feddr_plus_in_the_pocket_runs_with_every_tuned_method(path, tmp_path, capsys):
    files = ["-c", str(FEDDR_PLUS / "runs" / "digits.yaml"), "-c", str(path)]
    main(["fit", *files, *SHORT, *SMALL, "--trainer.evaluate_every", "0", "--trainer.default_root_dir", str(tmp_path)])
    assert capsys.readouterr().err == ""
    (row,) = rows(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
    assert -1 <= float(row["alignment/observed"]) <= 1


@pytest.mark.parametrize("method", [*BASELINES, "fedfrozen"])
def test_the_pocket_transformer_runs_with_every_method(method, tmp_path, capsys):
    path = FEDFROZEN / "tuned" / f"{method}.yaml"
    over = path if path.exists() else CONFIGS / "method" / f"{method}.yaml"
    files = ["-c", str(FEDFROZEN / "runs" / "digits.yaml"), "-c", str(over)]
    main(["fit", *files, *SHORT, *SMALL, "--trainer.evaluate_every", "0", "--trainer.default_root_dir", str(tmp_path)])
    assert capsys.readouterr().err == ""
