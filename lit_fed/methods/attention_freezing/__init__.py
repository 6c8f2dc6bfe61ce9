"""FedFrozen, and the query, key and value parameters of a network."""

from lit_fed.methods.attention_freezing.fedfrozen import FedFrozen
from lit_fed.methods.attention_freezing.projections import AttentionNames, merged, separate_attention

__all__ = ["AttentionNames", "FedFrozen", "merged", "separate_attention"]
