"""UWA's convergence theory: descent on what a mixture of clients teaches, seen as biased descent on the true loss."""

from lit_fed.studies.simulations.biased_descent.panels import Proposition42

__all__ = ["Proposition42"]
