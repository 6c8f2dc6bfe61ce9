"""UWA's convergence theory: descent on the predictions of a mixture of clients, as biased descent on the true loss."""

from lit_fed.studies.papers.uwa.exchanges import Exchanges
from lit_fed.studies.papers.uwa.panels import Proposition42

__all__ = ["Exchanges", "Proposition42"]
