"""A causal language model that answers instructions: Llama's decoder, of any size, with adapters.

Run it with ``lit-fed fit -c configs/quickstart.yaml -c examples/gallery/language.yaml``; docs/adapters.md says more.
"""

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics.text import Perplexity

from examples.language_model.instructions import ANSWER, END, PAD
from lit_fed.errors import ConfigError
from lit_fed.networks import Adapter, adapt_network, load_weights

Batch = tuple[Tensor, Tensor]
SKIPPED = -100  # a token that the loss leaves out


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary position embedding (Su et al., 2021), in Llama's order of pairs: (B, heads, L, d) to the same."""
    half = x.shape[-1] // 2
    speeds = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * speeds
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Causal attention with rotary positions; several heads may share keys and values."""

    def __init__(self, dim: int, heads: int, kv_heads: int, base: float) -> None:
        super().__init__()
        self.base, self.size = base, dim // heads
        self.q_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, dim) to the same."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        shared = q.shape[1] // k.shape[1]
        k, v = rotate(k, self.base).repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        mixed = F.scaled_dot_product_attention(rotate(q, self.base), k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) · up(x))."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, dim) to the same."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Attention, then the MLP, each after a norm and added to its input."""

    def __init__(self, dim: int, hidden: int, heads: int, kv_heads: int, base: float, eps: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(dim, heads, kv_heads, base), GatedMLP(dim, hidden)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim, eps), nn.RMSNorm(dim, eps)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, dim) to the same."""
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Llama (Touvron et al., 2023), with the names of its weights in transformers' ``LlamaForCausalLM``.

    Args:
        vocab_size: Number of tokens.
        dim: Width.
        hidden: Width of the MLPs.
        depth: Blocks.
        heads: Heads of queries.
        kv_heads: Heads of keys and values; divides `heads`.
        base: Base of the rotary angles.
        eps: Of the norms.
    """

    def __init__(
        self,
        vocab_size: int = 259,
        dim: int = 64,
        hidden: int = 172,
        depth: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        base: float = 10000.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if dim % (2 * heads) or heads % kv_heads:
            raise ConfigError(f"Decoder.heads is {heads}; it must divide {dim} / 2, and kv_heads must divide it")
        blocks = (Block(dim, hidden, heads, kv_heads, base, eps) for _ in range(depth))
        parts = {"embed_tokens": nn.Embedding(vocab_size, dim), "layers": nn.ModuleList(blocks)}
        self.model = nn.ModuleDict({**parts, "norm": nn.RMSNorm(dim, eps)})
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)
        for weight in (parameter for parameter in self.parameters() if parameter.ndim == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens to logits (B, L, vocab_size) of each next token."""
        x = self.model["embed_tokens"](tokens.long())
        for block in self.model["layers"]:  # type: ignore[attr-defined]  # a ModuleList
            x = block(x)
        logits: Tensor = self.lm_head(self.model["norm"](x))
        return logits


def answers_of(tokens: Tensor) -> Tensor:
    """The tokens to predict (B, L − 1) at each position: the answer's, and `SKIPPED` for the prompt's and padding."""
    after = (tokens == ANSWER).cumsum(1)[:, :-1] > 0
    return tokens[:, 1:].long().masked_fill(~after | (tokens[:, 1:] == PAD), SKIPPED)


class LanguageModel(LightningModule):
    r"""Cross-entropy of the answer's tokens given the prompt: the mean of :math:`-\log p(t_i \mid t_{<i})`.

    Logs ``loss`` and ``perplexity``, the exponential of the mean over all answers' tokens.

    Args:
        network: Settings of `Decoder`.
        adapter: Low-rank adapters, and the parts that train beside them; null to train everything.
        weights: A file or folder of a Llama's pretrained weights, see `load_weights`; null for random ones.
        lr: Learning rate of AdamW.
        new_tokens: The longest answer that `predict_step` writes.
    """

    metrics: ClassVar[dict[str, Literal["max", "min"]]] = {"perplexity": "min", "loss": "min"}

    def __init__(
        self,
        network: dict[str, Any] | None = None,
        adapter: Adapter | None = None,
        weights: str | None = None,
        lr: float = 3e-3,
        new_tokens: int = 16,
    ) -> None:
        super().__init__()
        self.network = Decoder(**(network or {}))
        if weights is not None:
            load_weights(self.network, weights)
        if adapter is not None:
            adapt_network(self.network, self.network.lm_head, adapter)
        self.lr, self.new_tokens = lr, new_tokens
        self.perplexity = Perplexity(ignore_index=SKIPPED)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, L, vocab_size)."""
        logits: Tensor = self.network(x)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss."""
        return F.cross_entropy(self(batch[0])[:, :-1].flatten(0, 1), answers_of(batch[0]).flatten())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs ``val/…``."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs ``test/…``, which protocols report as ``global/…`` and ``clients/…``."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Batch, stage: str) -> None:
        logits, targets = self(batch[0])[:, :-1], answers_of(batch[0])
        self.log(f"{stage}/loss", F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        self.perplexity.update(logits, targets)
        self.log(f"{stage}/perplexity", self.perplexity)

    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> dict[str, Tensor]:
        """The most probable answer to each prompt, a token at a time: (B, new_tokens), padded after its end."""
        tokens = batch if isinstance(batch, Tensor) else batch[0]
        answers = tokens.new_full((len(tokens), self.new_tokens), PAD)
        for row, answer in zip(tokens, answers, strict=True):
            text = row[: int((row == ANSWER).int().argmax()) + 1]
            for position in range(self.new_tokens):
                token = self(text[None])[0, -1].argmax()
                if token == END:
                    break
                answer[position] = token
                text = torch.cat([text, token[None].to(text.dtype)])
        return {"answer": answers}

    def configure_optimizers(self) -> Any:
        """AdamW over what trains."""
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=self.lr)
