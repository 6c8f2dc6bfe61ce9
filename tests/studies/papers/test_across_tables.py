"""The papers' tables of costs: published numbers come out of architectures' shapes and of runs' settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_fed.command.cli import main
from lit_fed.networks import MLP
from lit_fed.studies.papers.fedfrozen.attention_shares import count
from lit_fed.studies.papers.fedfrozen.blueprints import BLUEPRINTS, build_blueprint
from tests.support import ROOT

CONFIGS = ROOT / "configs"

# Table 2 of the paper: QK %, QKV %, cost ratio.
PUBLISHED = {
    "ViT-B/32": ("16.10", "24.15", "0.8712"),
    "T5-small": ("10.10", "15.16", "0.8752"),
    "BART-base": ("9.81", "14.72", "0.8780"),
    "ELECTRA-base": ("13.02", "19.53", "0.8959"),
    "BERT-base": ("12.95", "19.42", "0.8964"),
}
# Parameters as their authors and transformers count them.
UNIQUE = {
    "vit-base-patch32": 88_045_824,
    "t5-small": 60_506_624,
    "bart-base": 139_420_416,
    "electra-base": 108_891_648,
    "bert-base": 109_482_240,
}


def test_table_2_from_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["cost", "--config", str(ROOT / "configs/papers/fedfrozen/costs/table2.yaml")])
    printed = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[1:-1]}
    assert {name: (row[3], row[4], row[6]) for name, row in printed.items()} == PUBLISHED


@pytest.mark.parametrize("name", BLUEPRINTS)
def test_blueprints_have_the_published_numbers_of_parameters(name: str) -> None:
    assert count(build_blueprint(name)).unique == UNIQUE[name]


def test_blueprints_are_what_transformers_builds() -> None:
    transformers = pytest.importorskip("transformers")
    configs = {
        "vit-base-patch32": (transformers.ViTModel, transformers.ViTConfig(patch_size=32)),
        "bert-base": (transformers.BertModel, transformers.BertConfig()),
        "electra-base": (
            transformers.ElectraModel,
            transformers.ElectraConfig(
                embedding_size=768, hidden_size=768, num_attention_heads=12, intermediate_size=3072
            ),
        ),
        "t5-small": (transformers.T5Model, transformers.T5Config()),
        "bart-base": (
            transformers.BartModel,
            transformers.BartConfig(
                d_model=768, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
                encoder_attention_heads=12, decoder_attention_heads=12,
            ),
        ),
    }  # fmt: skip
    for name, (kind, config) in configs.items():
        with torch.device("meta"):
            theirs = count(kind(config))
        ours = count(build_blueprint(name))
        assert (theirs.kernel, theirs.values, theirs.unique) == (ours.kernel, ours.values, ours.unique), name


def test_uwas_communication(capsys: pytest.CaptureFixture[str]) -> None:
    # Section 5.4: 172 MB against 2 MB, and 468 MB against 50 MB.
    # 4.3e6·4·2·5 = 172e6, 2,000·10·4·25 = 2e6, 11.7e6·4·2·5 = 468e6, 5,000·100·4·25 = 50e6.
    main(["cost", "--config", str(CONFIGS / "papers" / "uwa" / "costs" / "uwa_communication.yaml")])
    figures = [line.rsplit(maxsplit=2)[1] for line in capsys.readouterr().out.splitlines()]
    assert figures == ["172.00", "2.00", "468.00", "50.00"]


def test_exchanges_without_their_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(
        "cost: {class_path: lit_fed.studies.papers.uwa.Exchanges, init_args: {runs: {Ours: {rounds: 3, public: 10}}}}"
    )
    with pytest.raises(SystemExit):
        main(["cost", "-c", str(path)])
    assert "cost.runs 'Ours' needs rounds, parameters and models, or" in capsys.readouterr().err


def test_percentages_by_hand() -> None:
    # Blocks of width 768: 2·(768² + 768) = 1,181,184 for queries and keys, times 12 = 14,174,208, of 88,045,824.
    groups = count(build_blueprint("vit-base-patch32"))
    assert groups.kernel == 12 * 2 * (768 * 768 + 768)
    assert groups.percentages == pytest.approx((16.09867, 24.148), abs=1e-4)
    assert count(MLP(10, 1, (1, 8, 8))).kernel == 0


def test_an_unknown_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.yaml"
    table = "lit_fed.studies.papers.fedfrozen.AttentionShares"
    path.write_text(f"cost: {{class_path: {table}, init_args: {{models: {{GPT: gpt}}}}}}")
    with pytest.raises(SystemExit):
        main(["cost", "-c", str(path)])
    assert "architecture 'gpt' is unknown; choose one of vit-base-patch32" in capsys.readouterr().err
