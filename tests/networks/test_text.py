"""Networks on token ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_fed.errors import ConfigError
from lit_fed.networks import EmbeddingBag, build_network, classifier, features


def test_embedding_bag_is_the_mean_of_its_words() -> None:
    network = build_network("embedding_bag", 3, 4, (4,), vocab_size=10, dim=5)
    assert isinstance(network, EmbeddingBag)
    x = torch.tensor([[1, 2, 0, 0], [3, 3, 9, 1], [0, 0, 0, 0]], dtype=torch.int32)
    words = network.words.weight
    expected = torch.stack([(words[1] + words[2]) / 2, (2 * words[3] + words[9] + words[1]) / 4, torch.zeros(5)])
    torch.testing.assert_close(features(network, x), expected)
    torch.testing.assert_close(network(x), classifier(network)(expected))
    # 10 words of 5 values, and 3 × 5 + 3 of the head.
    assert sum(parameter.numel() for parameter in network.parameters()) == 50 + 18


@pytest.mark.parametrize("name", ["embedding_bag", "bert_tiny"])
def test_images_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="for rows of token ids"):
        build_network(name, 10, 1, (1, 8, 8))
    with pytest.raises(ConfigError, match="vocab_size is 1"):
        build_network("embedding_bag", 10, 1, (8,), vocab_size=1)


def test_bert_tiny_has_the_published_size() -> None:
    pytest.importorskip("transformers")
    network = build_network("bert_tiny", 10, 1, (16,)).eval()
    # 4.4 million in Turc et al.'s Table 1: embeddings (30522 + 512 + 2 + 2)·128 = 3,972,864, two layers of
    # 4·(128² + 128) + 2·128·512 + 512 + 128 + 4·128 = 198,272, the pooler 128² + 128 = 16,512, the head 1,290.
    assert sum(p.numel() for p in network.parameters()) == 3_972_864 + 2 * 198_272 + 16_512 + 1_290
    x = torch.tensor([[5, 6, 7, *[0] * 13]], dtype=torch.int32)
    assert features(network, x).shape == (1, 128)
    torch.testing.assert_close(network(x), network(x[:, :3]))  # padding is not looked at


def test_bert_tiny_reads_weights_from_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = build_network("bert_tiny", 10, 1, (16,), vocab_size=100)
    source.bert.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    found = build_network("bert_tiny", 10, 1, (16,), vocab_size=100, weights=str(tmp_path))
    for name, tensor in source.bert.state_dict().items():  # type: ignore[union-attr, operator]
        assert torch.equal(found.state_dict()[f"bert.{name}"], tensor)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="bert_tiny cannot read weights from"):
        build_network("bert_tiny", 10, 1, (16,), weights=str(tmp_path / "empty"))


def test_bert_tiny_names_a_folder_of_weights_that_does_not_exist(tmp_path: Path) -> None:
    """Before transformers reads the path, which takes what is not a folder for a name on a hub."""
    nowhere = tmp_path / "nowhere"
    with pytest.raises(ConfigError, match=f"bert_tiny reads weights from a folder, and {nowhere} is not one; name the"):
        build_network("bert_tiny", 10, 1, (16,), weights=str(nowhere))
