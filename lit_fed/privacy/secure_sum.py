"""The settings of a secure sum, whose protocol is the wing's `lit_fed.federation.secure`."""

from __future__ import annotations

from dataclasses import dataclass

from lit_fed.arguments import checked_class
from lit_fed.checks import check_range
from lit_fed.engine.method.wrapper import Wrapper
from lit_fed.errors import ConfigError
from lit_fed.wings import of_wing


@checked_class
@dataclass(frozen=True)
class SecureSum:
    """Settings of a secure sum.

    Args:
        threshold: t, the number of nodes without which nothing is unmasked; above two thirds of them.
        clip: C, the largest norm of a client's update.
        nodes: Number of nodes in memory, over which a simulation runs the protocol; client k is on node k modulo their
            number. With null it sums the same integers without masks: the result is the same to the bit. Null in a
            federation, whose nodes are there.
        dishonest: B, the number of nodes on the server's side that the sum bears: the fewer, the fewer masks of pairs
            there are. With null it is 2t - n - 1 of n nodes, the most that t bears, and all pairs have masks.
    """

    threshold: int
    clip: float
    nodes: int | None = None
    dishonest: int | None = None

    def validate(self) -> None:
        """Refuse settings out of range."""
        check_range("trainer.secure_sum.clip", self.clip, above=0)
        check_range("trainer.secure_sum.threshold", self.threshold, least=3)
        check_range("trainer.secure_sum.nodes", self.nodes, least=3, most=1000, null="to sum without masks")
        check_range("trainer.secure_sum.dishonest", self.dishonest, least=0, null="for the most that threshold bears")
        if self.nodes is not None:
            self.check_nodes(self.nodes, f" of {self.nodes} nodes")

    def check_nodes(self, nodes: int, said: str) -> None:
        """Refuse a number of nodes; the words on it follow the threshold."""
        if not 2 * nodes < 3 * self.threshold <= 3 * nodes:
            raise ConfigError(
                f"trainer.secure_sum.threshold is {self.threshold}{said}; it must be above two thirds of them, and at "
                "most their number"
            )
        most = 2 * self.threshold - nodes - 1
        check_range("trainer.secure_sum.dishonest", self.dishonest, most=most, null=f"for {most}")

    def wrapper(self) -> Wrapper:
        """The wrapper that replaces a method's mean."""
        made: Wrapper = of_wing("federation.secure.summed").SummedSecurely(self)
        return made
