"""The privacy card: the promise of a private run, whom it protects, and everything else that left the clients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_fed.privacy.keyed import PrivacyState

_WRITTEN = """\
These files are *not* private, and must not be handed on: `clients.csv`, `partition.json`, `metrics.csv` and the event
files (metrics of clients, means over them, drift, counts, who took part), and checkpoints chosen or stopped by such
metrics.
"""
_WITHHELD = """\
Metrics of clients and means over them, counts, and who took part were not written.
"""
_SERVER = """\
What the server's process saw of updates before the sum was not private against the server itself.
"""
_NODES = """\
Each node made its part of the noise with its own key, so that the promise holds against the server too, while every sum
has vectors of at least {} honest nodes, and the server has no more nodes on its side than `trainer.secure_sum` bears.
The server knows who takes part, and clients' numbers of samples.
"""
_STATES = """\
The states that clients keep between rounds, the table of them and the data's fingerprints (`checkpoints/clients/`) are
not private. The metrics `global/…` are computed on the shared test set, which is protected only if it comes from none
of the clients.
"""
_CLAIMED = """\
Each node promises the samples of its clients (ε, δ)-differential privacy against all who see what it sends, this server
too, by noise from a key that the node alone has. The table lists each node's claim with its last update; this server
cannot check it. "none": no claim has arrived.
"""
_RAISE = """\
`trainer.on_client_failure` is `raise`: a client that fails ends the run, which tells that it took part.
"""


def card(state: PrivacyState, withheld: bool, honest_nodes: int = 0) -> str:
    """The card in Markdown.

    Args:
        state: The promise.
        withheld: Whether data that are not private were kept out of files.
        honest_nodes: Number of nodes that the promise rests on; 0 where the nodes add no noise.
    """
    lines, entries = ["# Privacy card", ""], state.as_state()
    if state.noise_from != "a key file":
        lines += [
            "**A simulation**: noise and cohorts follow from the seed, so whoever knows it can take the noise off.",
            "",
        ]
    lines += [
        f"The global model after {state.releases} releases is (ε, δ)-differentially private with "
        f"**ε = {state.epsilon}** at **δ = {state.delta:g}** for {state.unit}: neighbouring populations "
        f"differ by {state.relation}.",
        "",
        "| | |",
        "|---|---|",
    ]
    labels = {
        "mechanism": "mechanism", "participation": "cohorts", "expected_cohort": "expected cohort",
        "clip_norm": "clipping norm", "noise_multiplier": "noise multiplier", "accountant": "accountant",
        "noise_from": "noise from", "batch_size": "expected batch", "steps": "steps of a client in a round",
        "left_out": "clients left out, as they have spent the budget",
    }  # fmt: skip
    lines += [f"| {label} | {_text(entries[key])} |" for key, label in labels.items() if key in entries]
    lines += ["", "## What is not private", "", _WITHHELD if withheld else _WRITTEN]
    if honest_nodes:
        lines += [_NODES.format(honest_nodes)]
    elif "expected_cohort" in entries and withheld:
        lines += [_SERVER]
    lines += [_STATES]
    if state.on_client_failure == "raise":
        lines += [_RAISE]
    if not honest_nodes:
        lines += ["Noise is drawn in floating point, and rounded to the grid of the sum; see `lit_fed.privacy.keys`."]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def claims_card(state: PrivacyState, claims: Tensor, withheld: bool) -> str:
    """The card of a server whose clients are on nodes: the promise of each node, in its own words.

    Args:
        state: As in `card`.
        claims: ε, δ and z of each client, (N, 3); -1 for none.
        withheld: As in `card`.
    """
    lines = ["# Privacy card", "", _CLAIMED, "| client | ε | δ | noise multiplier |", "|---|---|---|---|"]
    for client_id, claim in enumerate(claims.tolist()):
        told = ("none", "none", "none") if min(claim) < 0 else (f"{value:.6g}" for value in claim)
        lines.append(f"| {client_id} | {' | '.join(told)} |")
    lines += ["", f"Clipping norm: {_text(state.clip_norm)}. {state.unit.capitalize()} is protected.", ""]
    return "\n".join([*lines, "## What is not private", "", _WITHHELD if withheld else _WRITTEN, _STATES])
