"""UWA's convergence theory: descent on what a mixture of clients teaches, seen as biased descent on the true loss."""

from lit_fed.papers.uwa.exchanges import Exchanges
from lit_fed.papers.uwa.panels import Proposition42

__all__ = ["Exchanges", "Proposition42"]
