"""A client's training samples of each class: a method's `start` looks them up, its `objective` reads them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fed.algorithm import Client

_RESULT = "classes"  # in a client's results, so that groups stack them


def look_up_counts(client: Client) -> None:
    """Keep the client's class counts for its work; a plain ``lightning.Trainer`` has none."""
    if client.data is not None:
        counts = torch.from_numpy(client.population.census.class_counts(client.id)).to(client.device)
        client.results[_RESULT] = {"counts": counts}


def own_counts(client: Client, logits: Tensor) -> Tensor:
    """The client's samples of each class, (C,), for logits (B, C); equal under a plain ``lightning.Trainer``."""
    if _RESULT not in client.results:
        return torch.ones(logits.shape[1], dtype=torch.int64, device=logits.device)
    counts = client.results[_RESULT]["counts"]
    return F.pad(counts, (0, logits.shape[1] - len(counts)))
