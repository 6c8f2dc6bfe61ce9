"""RAF's comparison of regression with classification (Figure 12)."""

from lit_fed.studies.papers.raf.facing import Facing

__all__ = ["Facing"]
