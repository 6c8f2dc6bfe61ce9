"""Networks on rows of token ids, where 0 pads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.networks.basic import ClassificationNetwork


class EmbeddingBag(ClassificationNetwork):
    """The mean of a text's word vectors, then a linear head.

    Args:
        num_classes: Length of the output.
        in_channels: Not used; every network takes it.
        input_shape: (length,), the number of tokens of a text.
        vocab_size: Token ids lie in 0 … vocab_size − 1; the data's.
        dim: Length d of a word vector.
        head_bias: Whether the head has a bias.

    Raises:
        ConfigError: If the input is not a row of tokens, or `vocab_size` is below 2.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 1,
        input_shape: Sequence[int] = (64,),
        vocab_size: int = 8192,
        dim: int = 64,
        head_bias: bool = True,
    ) -> None:
        del in_channels
        _check_tokens(type(self).__name__, input_shape)
        super().__init__(dim, num_classes, head_bias)
        check_range("EmbeddingBag.vocab_size", vocab_size, least=2)
        self.words = nn.EmbeddingBag(vocab_size, dim, mode="mean", padding_idx=0)

    def forward_features(self, x: Tensor) -> Tensor:
        """Mean word vectors of a batch: (B, length) integers to (B, d); 0 for a text of padding."""
        embedded: Tensor = self.words(x)
        return embedded


class BertTiny(ClassificationNetwork):
    """BERT with 2 layers of width 128, its pooled first token, dropout and a linear head; 4.4 million parameters.

    Turc, Chang, Lee, Toutanova: "Well-Read Students Learn Better: On the Importance of Pre-training Compact Models",
    2019, arXiv:1908.08962. Needs the extra ``text``; nothing is downloaded.

    Args:
        num_classes: Length of the output.
        in_channels: Not used; every network takes it.
        input_shape: (length,), the number of tokens of a text, at most 512.
        vocab_size: Token ids lie in 0 … vocab_size − 1; the data's.
        weights: A folder of pretrained weights for transformers; null for random weights.
        head_bias: Whether the head has a bias.

    Raises:
        ConfigError: If transformers is not installed, the input is not a row of tokens, or the weights cannot be read.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 1,
        input_shape: Sequence[int] = (64,),
        vocab_size: int = 30522,
        weights: str | None = None,
        head_bias: bool = True,
    ) -> None:
        del in_channels
        _check_tokens(type(self).__name__, input_shape)
        super().__init__(128, num_classes, head_bias)
        self.bert = _build_bert(vocab_size, weights)
        self.dropout = nn.Dropout(0.1)

    def forward_features(self, x: Tensor) -> Tensor:
        """Pooled outputs of a batch: (B, length) integers to (B, 128)."""
        pooled: Tensor = self.bert(input_ids=x.long(), attention_mask=(x != 0).long()).pooler_output
        return self.dropout(pooled)  # type: ignore[no-any-return]  # a module's call is untyped


def _build_bert(vocab_size: int, weights: str | None) -> Any:
    if weights is not None and not Path(weights).is_dir():
        raise ConfigError(f"network bert_tiny reads weights from a folder, and {weights} is not one; name the folder")
    try:
        from transformers import BertConfig, BertModel
    except ImportError as error:
        advice = "network bert_tiny needs transformers; install it with pip install 'lit-fed[text]'"
        raise ConfigError(advice) from error
    if weights is None:
        return BertModel(
            BertConfig(
                vocab_size=vocab_size,
                hidden_size=128,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=512,
                attn_implementation="eager",  # the same sums on every machine and version
            )
        )
    try:
        bert = BertModel.from_pretrained(weights, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"network bert_tiny cannot read weights from {weights}: {reason}") from error
    if bert.config.hidden_size != 128 or bert.config.vocab_size > vocab_size:
        raise ConfigError(
            f"network bert_tiny: {weights} has width {bert.config.hidden_size} and {bert.config.vocab_size} tokens; "
            f"it must have width 128 and at most vocab_size = {vocab_size} tokens"
        )
    return bert.to(torch.float32)


def _check_tokens(network: str, input_shape: Sequence[int]) -> None:
    if len(tuple(input_shape)) != 1:
        raise ConfigError(f"{network}.input_shape is {tuple(input_shape)}; it must be (tokens,), for rows of token ids")
