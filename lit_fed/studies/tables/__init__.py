"""Papers' tables that need no run, for ``python cli.py cost``."""

from lit_fed.studies.tables.attention_shares import AttentionShares
from lit_fed.studies.tables.exchanges import Exchanges

__all__ = ["AttentionShares", "Exchanges"]
