"""Methods over low-rank adapters W₀ + s·BA, whose base stays with the clients."""

from lit_fed.methods.low_rank.fedex_lora import FedExLoRA
from lit_fed.methods.low_rank.fedit import FedIT
from lit_fed.methods.low_rank.fedsa_lora import FedSALoRA
from lit_fed.methods.low_rank.ffa_lora import FFALoRA
from lit_fed.methods.low_rank.flora import FLoRA
from lit_fed.methods.low_rank.hetlora import HetLoRA

__all__ = ["FFALoRA", "FLoRA", "FedExLoRA", "FedIT", "FedSALoRA", "HetLoRA"]
