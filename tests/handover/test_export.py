"""What `lit-fed export` writes: read, run and right where there is no lit_fed, and honest about what it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning import LightningModule
from safetensors import safe_open
from torch import Tensor, nn

from examples.my_module import LitDigits
from lit_fed import export_network, load_network
from lit_fed.command.cli import main
from lit_fed.data import Digits
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.handover import export
from lit_fed.handover.card import Facts, Inputs, card, facts_of
from lit_fed.networks import build_network
from tests.command.support import command, error_of
from tests.command.test_across_load_network import OwnCode, reported, stored
from tests.support import ROOT, LeastSquares, fit, saved_weights, small_disk

WITHOUT = "import sys; sys.modules['lit_fed'] = None\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's first three rounds; at the rates of its whole schedule the last of them is the best."""
    folder = tmp_path_factory.mktemp("trained")
    schedule = ("--model.init_args.lr_scheduler.init_args.T_max", "40")
    main(command("fit", "--trainer.max_rounds", "3", *schedule, "--trainer.default_root_dir", folder))
    return folder / "lightning_logs" / "version_0"


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handed_over")
    assert "model.pt2" in export_network(run, folder).files
    return folder


def uses(folder: Path) -> list[str]:
    """What the card says that one writes."""
    return re.findall(r"```python\n(.*?)\n```", (folder / "MODEL_CARD.md").read_text(encoding="utf-8"), re.DOTALL)


def elsewhere(code: str, folder: Path) -> None:
    """Run code in a folder where lit_fed cannot be imported."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + code], cwd=folder, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_three_lines_without_lit_fed_predict_what_was_reported(run: Path, exported: Path, tmp_path: Path) -> None:
    """On bytes as the data set stores them; of another number than the network was exported with."""
    x, y = stored(Digits(num_clients=20))
    np.save(tmp_path / "x.npy", x.numpy())
    use = next(use for use in uses(exported) if "model.pt2" in use)
    assert len(use.splitlines()) == 3
    read = f"import numpy\nx = torch.from_numpy(numpy.load({str(tmp_path / 'x.npy')!r}))\n"
    told = f"numpy.save({str(tmp_path / 'y.npy')!r}, model(x).argmax(1).numpy())\n"
    elsewhere(f"{use}\n{read}{told}assert outputs.shape == (1, 10)", exported)
    right = float((np.load(tmp_path / "y.npy") == y.numpy()).mean())
    assert right == pytest.approx(reported(run))
    assert right > 0.3, "of a network that has learnt nothing the check would say nothing"


def test_other_runtimes_predict_the_same(run: Path, exported: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    onnxruntime = pytest.importorskip("onnxruntime")
    x, _ = stored(Digits(num_clients=20))
    session = onnxruntime.InferenceSession(exported / "model.onnx")
    (logits,) = session.run(None, {"inputs": x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(logits, load_network(run)(x).numpy(), rtol=1e-3, atol=1e-4)
    elsewhere(next(use for use in uses(exported) if "model.onnx" in use), exported)


def test_another_run_begins_with_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("timm", "1.0.31")  # reads weights
    small = {"patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 3}
    options = {"trainer.max_rounds": 1, "trainer.local_epochs": 1, "trainer.evaluate_every": 0}
    options |= {"model.network": "vit_tiny_patch16_224", "model.network_args": json.dumps(small)}
    given = [str(part) for key, value in options.items() for part in (f"--{key}", value)]
    main(command("fit", *given, "--trainer.default_root_dir", tmp_path))
    export_network(tmp_path / "lightning_logs/version_0", tmp_path / "out", onnx=False)
    file = tmp_path / "out" / "model.safetensors"
    begun = build_network(
        "vit_tiny_patch16_224", 3, 1, (1, 8, 8), pretrained=True, pretrained_cfg_overlay={"file": str(file)}, **small
    ).state_dict()
    with safe_open(file, "pt") as trained:
        assert begun["head.weight"].shape == (3, 24)
        for name in begun.keys() - {"head.weight", "head.bias"}:
            assert torch.equal(begun[name], trained.get_tensor(name)), name


def test_the_weights_are_those_of_the_run_with_what_is_known_of_them(run: Path, exported: Path) -> None:
    trained = torch.load(run / "checkpoints/best.ckpt", weights_only=True)["state_dict"]
    with safe_open(exported / "model.safetensors", "pt") as file:
        metadata, found = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {f"network.{name}" for name in found} == trained.keys()
    assert all(torch.equal(tensor, trained[f"network.{name}"]) for name, tensor in found.items())
    build_network("small_cnn", 10, 1, (1, 8, 8)).load_state_dict(found)
    facts = json.loads(metadata["lit_fed"])
    assert facts == json.loads((exported / "model.json").read_text())
    files = {"model.json": ""}
    torch.export.load(exported / "model.pt2", extra_files=files)
    assert json.loads(files["model.json"]) == facts
    assert facts["class_names"] == [str(digit) for digit in range(10)]
    assert facts["preprocessing"][0]["step"] == "normalize"
    assert facts["input"] == {"shape": [None, 1, 8, 8], "dtype": "uint8"}
    assert "root" not in facts["data"][1], "the path of whoever trained it"


def test_the_card_says_data_rounds_method_metric_and_protocol(run: Path, exported: Path) -> None:
    text = (exported / "MODEL_CARD.md").read_text(encoding="utf-8")
    clients = json.loads((run / "partition.json").read_text())["clients"]
    samples = sum(len(client["indices"]) for client in clients.values())
    for line in (
        "# Classifier by FedAvg on Digits",
        "| clients | `20` |",
        f"| training samples | `{samples}` |",
        "| trained for | 3 rounds |",
        f"| `global/acc` | {reported(run):.6g} | the global model on the shared test set |",
        "- Outputs, in their order: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9.",
        f"| torch | {torch.__version__.partition('+')[0]}",
    ):
        assert f"\n{line}" in text
    assert yaml.safe_load(text.split("---\n")[1])["tags"] == ["federated-learning", "lit_fed"]
    assert '"alpha": 0.3' in text


def test_the_card_names_the_kind_of_each_global_model(run: Path) -> None:
    content = torch.load(run / "checkpoints/best.ckpt", weights_only=True)
    content["metrics"] = {"global_full/acc": 0.75, "clients/acc_mean": 0.5, "train/loss": 1.0}
    facts = facts_of(content, run / "checkpoints/best.ckpt")
    text = card(facts, [], Inputs((1, 8, 8), "uint8", {}))
    assert "| `global_full/acc` | 0.75 | the global model on the shared test set, for kind 'full' |" in text
    assert "| `clients/acc_mean` | 0.5 | each client's model on its own test data, before fine-tuning |" in text
    assert "train/loss" not in text


def test_a_command_writes_the_best_of_the_newest_run_here(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parents[1])
    main(["export", "--output", str(tmp_path / "out"), "--onnx", "false"])
    lines = capsys.readouterr().out.splitlines()
    names = ("model.safetensors", "model.json", "model.pt2", "MODEL_CARD.md")
    assert lines == [f"written     {tmp_path / 'out' / name}" for name in names]
    monkeypatch.chdir(tmp_path)
    told = "no run in lightning_logs has a best.ckpt; name a run's folder with --ckpt_path"
    assert error_of(["export"], capsys) == told
    assert error_of(["export", "--ckpt_path", "nowhere"], capsys) == "there is no checkpoint at nowhere"


def test_onnx_without_its_packages(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.onnx").write_text("of an export before")
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs onnx and onnxscript; install with pip install 'lit-fed\[onnx\]'"):
        export_network(run, tmp_path, onnx=True, overwrite=True)
    with pytest.raises(ConfigError, match=r"model\.onnx exists; name another file with output, or replace it"):
        export_network(run, tmp_path)
    assert (tmp_path / "model.onnx").read_text() == "of an export before"
    (tmp_path / "mine.txt").write_text("mine")
    done = export_network(run, tmp_path, overwrite=True)
    assert done.lacking == {"model.onnx": "onnx and onnxscript not installed; pip install 'lit-fed[onnx]'"}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*done.files, "mine.txt"])


@pytest.mark.parametrize("most", [100, 10_000, 30_000])
def test_a_full_disk_leaves_the_export_before_whole(run: Path, tmp_path: Path, most: int, capsys: Any) -> None:
    out = tmp_path / "out"
    words = ["export", "--ckpt_path", str(run), "--onnx", "false", "--output", str(out)]
    main(words)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    # The weights take 6,090 · 4 = 24,360 bytes, model.pt2 holds them and the program: each step meets a full disk once.
    assert len(before["model.safetensors"]) > 10_000
    assert len(before["model.safetensors"]) < 30_000 < len(before["model.pt2"])
    assert "model.safetensors exists" in error_of(words, capsys)
    with small_disk(most):
        told = error_of([*words, "--overwrite"], capsys)
    assert told.startswith(f"cannot write {out}: [Errno 27] File too large")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with small_disk(most):
        error_of([*words[:-1], str(tmp_path / "new" / "deep")], capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    main([*words, "--overwrite"])
    assert {path.name for path in out.iterdir()} == before.keys()
    assert (out / "model.json").read_bytes() == before["model.json"]


# ---------------------------------------------------------------------- other networks and checkpoints


def test_a_module_of_ones_own_is_exported_whole(tmp_path: Path) -> None:
    made = fit(tmp_path, LitDigits(), Digits(num_clients=3), max_rounds=1)
    done = export_network(made.log_dir, tmp_path / "out", LitDigits(), onnx=False)
    assert "model.pt2" in done.files, done.lacking
    x, _ = stored(Digits(num_clients=3))
    own = LitDigits()
    own.load_state_dict(saved_weights(Path(made.log_dir)))
    with torch.no_grad():
        expected = own((x.float() / 16 - 0.3053) / 0.3760)  # by hand: sixteen shades, the digits' mean and deviation
        found = torch.export.load(tmp_path / "out/model.pt2").module()(x)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


class Picky(nn.Module):
    """Looks at its inputs' values, which no program can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x) if float(x.sum()) > 0 else x  # type: ignore[no-any-return]


class Faceless(LightningModule):
    """Has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(2, 1, bias=False)


@pytest.mark.parametrize("modules", ["[]", "[os]"])
def test_the_command_names_its_own_flag_for_a_class_that_is_not_allowed(
    modules: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    short = ("--trainer.max_rounds", "1", "--trainer.default_root_dir", tmp_path)
    main(command("fit", "-c", "examples/my_module.yaml", *short))
    where = ["--ckpt_path", str(tmp_path / "lightning_logs/version_0"), "--output", str(tmp_path / "out")]
    told = error_of(["export", *where, "--modules", modules], capsys)
    assert told.endswith("; if you trust it, allow it with --modules '[examples.my_module]'")
    assert "load_network" not in told


class Reader(nn.Module):
    """Reads up to 64 tokens; where it is fixed, 12."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(10, 4), nn.Parameter(torch.randn(64, 4))
        self.head, self.fixed = nn.Linear(4 * 12 if fixed else 4, 2), fixed

    def forward(self, x: Tensor) -> Tensor:
        read = self.embedding(x) + self.positions[: x.shape[1]]
        scores: Tensor = self.head(read.flatten(1) if self.fixed else read.mean(1))
        return scores


@pytest.mark.parametrize("fixed", [False, True])
def test_a_sequence_has_any_length_that_the_network_takes(fixed: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reader = Reader(fixed)
    path = Path(fit(tmp_path, max_rounds=1).log_dir) / "checkpoints" / "last.ckpt"
    content: dict[str, Any] = torch.load(path, weights_only=True)
    torch.save(content | {"state_dict": reader.state_dict()}, path)
    done = export_network(path, tmp_path / "out", reader, stored=((12,), "int64"))
    assert {"model.pt2", "model.onnx"} <= {*done.files}, done.lacking
    text = (tmp_path / "out/MODEL_CARD.md").read_text(encoding="utf-8")
    shape = json.loads((tmp_path / "out/model.json").read_text(encoding="utf-8"))["input"]["shape"]
    if fixed:
        assert shape == [None, 12]
        assert "a batch (B, 12) of `int64`, B of any size, the other sizes fixed" in text
        return
    assert shape == [None, None]
    assert "a batch (B, L) of `int64`, B of any size, L of 2 to 64" in text
    program = torch.export.load(tmp_path / "out/model.pt2").module()
    for length in (2, 5, 64):
        x = torch.randint(10, (2, length))
        with torch.no_grad():
            torch.testing.assert_close(program(x), reader(x))


@pytest.mark.parametrize(("network", "why"), [(Picky(), "data-dependent"), (Faceless(), "Faceless has no forward(x)")])
def test_what_cannot_be_written_is_said_and_the_rest_is_there(network: nn.Module, why: str, tmp_path: Path) -> None:
    made = fit(tmp_path, max_rounds=1)
    done = export_network(made.log_dir, tmp_path / "out", network)
    assert done.files == ("model.safetensors", "model.json", "MODEL_CARD.md")
    assert why in done.lacking["model.pt2"]
    assert "\n" not in done.lacking["model.pt2"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*done.files}
    assert len(uses(tmp_path / "out")) == 1


def test_preprocessing_that_is_code_is_said(tmp_path: Path) -> None:
    made = fit(tmp_path, LeastSquares(), OwnCode(2), max_rounds=1)
    export_network(made.log_dir, tmp_path / "out", nn.Linear(2, 1, bias=False), onnx=False)
    assert "These files do not hold the data module's preprocessing" in (tmp_path / "out/MODEL_CARD.md").read_text()


def test_a_checkpoint_that_does_not_say_what_an_input_is_like(tmp_path: Path) -> None:
    """Written before checkpoints said so, or by a server that has no data."""
    path = Path(fit(tmp_path, max_rounds=1).log_dir) / "checkpoints" / "last.ckpt"
    content: dict[str, Any] = torch.load(path, weights_only=True)
    assert content["inputs"].pop("stored") == ((2,), "float32")
    torch.save(content, path)
    network = nn.Linear(2, 1, bias=False)
    with pytest.raises(ConfigError, match=r"last\.ckpt does not describe the inputs; give the shape of one without"):
        export_network(path, tmp_path / "out", network)
    with pytest.raises(ConfigError, match="dtype is 'bytes'; it must be a type of torch, such as uint8"):
        export_network(path, tmp_path / "out", network, stored=((2,), "bytes"))
    for shape in ((0,), (-1, 2), (10**30,), (10**6, 10**6)):
        with pytest.raises(
            ConfigError, match=r"shape is \[.*\]; it must hold the sizes of one input, without the batch"
        ):
            export_network(path, tmp_path / "out", network, stored=(shape, "float32"))
    assert not (tmp_path / "out").exists()
    assert "model.pt2" in export_network(path, tmp_path / "out", network, stored=((2,), "float32"), onnx=False).files


def test_the_example_of_the_docs_is_there() -> None:
    assert "lit-fed export" in (ROOT / "docs/handover.md").read_text(encoding="utf-8")


HOSTILE = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[a](javascript:alert(1))", "![a](http://evil/a.png)",
    "https://evil.example", "www.evil.example", "a@evil.example", "`<b>`", "``<b>", "|<b>|", "\n\n# heading",
    "&lt;b&gt;",
    "\\<b>", "*bold*", "_it_", "~~s~~", "$x$", "| a |\n|---|\n", "\u202etxt", "- item", "```\n<b>",
)  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_whatever_things_are_called_stays_a_text_in_the_card(text: str) -> None:
    markdown = pytest.importorskip("markdown_it")  # rich brings it along
    plain = Facts(
        text, text, 3, (text, {text: text, "inner": {text: [text]}}), {text: text}, {text: text}, {text: text}, text,
        {f"global/{text}": 0.5}, "test", [{"step": text}], [text, text], {text: text},
    )  # fmt: skip
    reader = markdown.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    tokens = reader.parse(card(plain, [], Inputs((2,), "float32", {})))
    inner = [one for token in tokens for one in token.children or ()]
    assert {one.type for one in (*tokens, *inner)} & {
        "html_block", "html_inline", "link_open", "image", "em_open", "strong_open", "s_open", "fence"
    } == set()  # fmt: skip
    headings = [tokens[place + 1] for place, token in enumerate(tokens) if token.type == "heading_open"]
    headings = [one for one in headings if not one.content.startswith("tags:")]  # front matter, to a plain reader
    assert len(headings) == 8, "the title and seven sections"
    shown = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    assert "".join(one.content for one in headings[0].children) == f"{shown} by {shown} on {shown}"
    rows = [token for token in tokens if token.type == "tr_open"]
    cells = [token for token in tokens if token.type in ("td_open", "th_open")]
    assert len(cells) == 2 * len(rows) + 2, "but for the table of results, which has a third column in two rows"


def test_a_configuration_that_is_a_bomb_or_none_is_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    content = torch.load(run / "checkpoints/best.ckpt", weights_only=True)
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    merged = ["b0: &b0 {x: 1}"] + [f"b{n}: &b{n} {{<<: [{', '.join([f'*b{n - 1}'] * 9)}]}}" for n in range(1, 12)]
    for config in ("\n".join(lines), "\n".join(merged), "a: &a [*a]", "[" * 5000, "just a text", "trainer: 3"):
        path = tmp_path / "last.ckpt"
        torch.save(content | {"config": config}, path)
        for given in (None, build_network("small_cnn", 10, 1, (1, 8, 8))):
            with pytest.raises(CheckpointError) as caught:
                export_network(path, tmp_path / "out", network=given)
            assert "\n" not in str(caught.value)
            assert "last.ckpt" in str(caught.value)
    assert not (tmp_path / "out").exists()
