"""Methods with a frozen classifier, and the measurements of their paper."""

from lit_fed.methods.frozen_heads.alignment import Alignment
from lit_fed.methods.frozen_heads.fedbabu import FedBABU
from lit_fed.methods.frozen_heads.feddr_plus import DotRegression, FedDrPlus
from lit_fed.methods.frozen_heads.fedetf import FedETF
from lit_fed.methods.frozen_heads.spherefed import CalibratedTest, SphereFed

__all__ = ["Alignment", "CalibratedTest", "DotRegression", "FedBABU", "FedDrPlus", "FedETF", "SphereFed"]
