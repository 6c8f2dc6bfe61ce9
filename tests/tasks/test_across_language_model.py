"""The example of a language model: its loss, its network, and a run from JSON lines to answers."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch

from examples.language_model.instructions import ANSWER, END, FIRST, PAD, Instructions, draw, encode
from examples.language_model.model import SKIPPED, Decoder, LanguageModel, answers_of
from lit_fed.__main__ import main
from lit_fed.errors import ConfigError
from lit_fed.networks import Adapter
from tests.support import ROOT

BILLION = {"vocab_size": 32000, "dim": 2048, "hidden": 5632, "depth": 22, "heads": 32, "kv_heads": 4}
TINY = ["-c", str(ROOT / "configs/quickstart.yaml"), "-c", str(ROOT / "examples/gallery/language.yaml")]


def test_only_the_answer_and_its_end_count():
    row = torch.tensor([[7, 8, ANSWER, 9, 10, END, PAD, PAD]])
    assert answers_of(row).tolist() == [[SKIPPED, SKIPPED, 9, 10, END, SKIPPED, SKIPPED]]


def test_a_line_is_bytes_between_the_marks():
    tokens = encode("ab", "é", 8, "a line").tolist()
    assert tokens == [FIRST + 97, FIRST + 98, ANSWER, FIRST + 0xC3, FIRST + 0xA9, END, PAD, PAD]
    with pytest.raises(ConfigError, match=r"a line: 6 tokens; raise data\.length, which is 5"):
        encode("ab", "é", 5, "a line")


def test_a_prompt_does_not_change_with_the_answer_after_it():
    torch.manual_seed(0)
    network = Decoder()
    row = torch.randint(3, 259, (1, 10))
    other = torch.cat([row[:, :6], torch.randint(3, 259, (1, 4))], dim=1)
    assert torch.allclose(network(row)[:, :6], network(other)[:, :6], atol=1e-6)


def test_perplexity_is_the_exponential_of_the_mean_over_all_tokens():
    torch.manual_seed(0)
    model = LanguageModel()
    rows = [torch.from_numpy(encode(*texts, 12, ""))[None] for texts in (("a", "bcdef"), ("gh", "i"))]
    total, count = 0.0, 0
    for row in rows:
        logits, targets = model(row)[:, :-1], answers_of(row)
        model.perplexity.update(logits, targets)
        at = targets[0] != SKIPPED
        total -= float(logits.detach()[0, at].log_softmax(1)[range(int(at.sum())), targets[0, at]].sum())
        count += int(at.sum())
    assert count == 6 + 2  # each answer's bytes and its end
    assert float(model.perplexity.compute()) == pytest.approx(math.exp(total / count), rel=1e-5)


def test_the_billion_has_tinyllamas_weights_and_allocates_none():
    with torch.device("meta"):
        network = Decoder(**BILLION)
    # Embedding and head; per block queries and output, keys and values of 4 × 64, the MLP, two norms; the last norm.
    block = 2 * 2048 * 2048 + 2 * 256 * 2048 + 3 * 2048 * 5632 + 2 * 2048
    assert 2 * 32000 * 2048 + 22 * block + 2048 == 1_100_048_384  # "1.1B", Zhang et al., TinyLlama, 2024
    assert sum(weight.numel() for weight in network.parameters()) == 1_100_048_384


def test_it_computes_what_transformers_llama_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5)
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(config).eval()
    llama.save_pretrained(tmp_path)
    sizes = {"vocab_size": 50, "dim": 32, "hidden": 48, "depth": 2, "heads": 4, "kv_heads": 2}
    ours = LanguageModel(sizes, weights=str(tmp_path))
    tokens = torch.randint(0, 50, (3, 11))
    assert torch.allclose(ours(tokens), llama(tokens).logits, atol=1e-5)


def test_cost_counts_the_billion(capsys):
    main(
        ["cost", "-c", str(ROOT / "configs/quickstart.yaml"), "-c", str(ROOT / "examples/language_model/billion.yaml")]
    )
    told = capsys.readouterr().out
    # Rank 8 on each layer from n to m: 8 (n + m). Queries and output, keys and values, the MLP.
    adapters = 22 * 8 * (2 * (2048 + 2048) + 2 * (2048 + 256) + 3 * (2048 + 5632))
    assert adapters == 6_307_840
    assert "parameters 1,106,356,224\n" in told  # 1,100,048,384 + 6,307,840
    assert f"{4 * adapters:,}      " in told
    assert "4,425,424,896 bytes of parameters, 25,231,360 of gradients, 50,462,720 of Adam's moments" in told


def test_a_run_learns_and_predict_writes_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "gallery/instructions", train=160, test=16)
    main(["fit", *TINY, "--trainer.max_rounds", "2", "--trainer.enable_progress_bar", "false"])
    run = tmp_path / "lightning_logs/version_0"
    first, last = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    assert float(last["global/perplexity"]) < float(first["global/perplexity"]) < 259  # of equal probabilities
    assert float(last["clients/perplexity_mean"]) > 1
    trained = sum(weight.numel() for weight in LanguageModel(adapter=Adapter(8)).parameters() if weight.requires_grad)
    assert float(last["comm/uplink_bytes"]) == 8 * 4 * trained
    (tmp_path / "ask.jsonl").write_text('{"instruction": "Plural of castle."}\n{"instruction": "Letters in sun."}\n')
    answers = "--ckpt_path", str(run / "checkpoints/last.ckpt"), "--inputs", "ask.jsonl", "--output", "answers.csv"
    main(["predict", "-c", str(run / "config.yaml"), *answers])
    rows = list(csv.DictReader((tmp_path / "answers.csv").read_text(encoding="utf-8").splitlines()))
    assert [set(row) for row in rows] == [{"answer"}, {"answer"}]


def test_clients_and_categories_come_from_the_file(tmp_path):
    lines = [{"instruction": "a", "output": "b", "category": kind, "client": who} for kind, who in ("xp", "yq", "xq")]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    data = Instructions(root=str(tmp_path))
    data.setup("fit")
    assert (data.num_clients, data.class_names) == (2, ["x", "y"])
    assert [data.census.num_samples(client) for client in range(2)] == [1, 2]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", r"train\.jsonl, line 1 is not a JSON object with a text 'instruction'; correct it"),
        ('{"instruction": 3}', r"line 1 is not a JSON object with a text 'instruction'"),
        ('{"instruction": "a"}', r"line 1 lacks a text 'output'"),
        ("", r"train\.jsonl has no lines"),
    ],
)
def test_bad_lines_are_refused(tmp_path: Path, text: str, told: str) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        Instructions(root=str(tmp_path), num_clients=1).setup("fit")
