"""RAF's comparison of regression with classification (Figure 12), and its theory of the last layer (Theorem 1)."""

from lit_fed.studies.papers.raf.convergence import LastLayer
from lit_fed.studies.papers.raf.facing import Facing

__all__ = ["Facing", "LastLayer"]
