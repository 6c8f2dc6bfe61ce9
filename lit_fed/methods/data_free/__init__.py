"""Methods that distil without data: a generator on the server makes samples that no client has."""

from lit_fed.methods.data_free.fedgen import FedGen
from lit_fed.methods.data_free.hfedckd import HFedCKD
from lit_fed.methods.data_free.realism import PseudoMap, PseudoTest

__all__ = ["FedGen", "HFedCKD", "PseudoMap", "PseudoTest"]
