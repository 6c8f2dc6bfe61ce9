"""Effective steps: the factor by which a client's optimizer scaled its gradients."""

from __future__ import annotations

from torch.optim import SGD, Optimizer


class EffectiveSteps:
    r"""Distance of local SGD along a constant gradient of 1: the equivalent number of plain steps.

    Normalising a client's movement takes more than counting its steps, because momentum carries each gradient on.
    With learning rate η and momentum ρ, K steps move the weights by :math:`\eta \tilde K`,
    :math:`\tilde K = \frac{1}{1-\rho}\left(K - \rho\frac{1-\rho^K}{1-\rho}\right)` (Wang, Liu, Liang, Joshi, Poor:
    "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020, Section 3).
    Here the recursion itself runs on one number, which also covers dampening, Nesterov's form and learning rates that
    change between steps.

    Note:
        An optimizer without ``momentum``, such as Adam, counts plain steps: a ratio between clients, but no length, for
        its steps are not in proportion to the gradients (`measures`). The learning rate is that of the first parameter
        group.
    """

    @staticmethod
    def measures(optimizer: type[Optimizer]) -> bool:
        """Whether a movement divided by `distance` is a mean gradient: only where steps are in proportion to gradients.

        False for a class that does not derive from ``torch.optim.SGD``, of which this is not known.
        """
        return issubclass(optimizer, SGD)

    def __init__(self) -> None:
        self.distance = 0.0
        self._is_first = True
        self._first_lr = 0.0
        self._velocity = 0.0

    @property
    def steps(self) -> float:
        """The distance in units of the first learning rate: K̃."""
        return self.distance / self._first_lr if self._first_lr else 0.0

    def begin_phase(self) -> None:
        """The next step is a fresh optimizer's first."""
        self._is_first = True

    def extend(self, distance: float, like: EffectiveSteps) -> None:
        """Add a phase that another instance counted.

        Args:
            distance: The phase's.
            like: The instance that counted it.
        """
        self.distance += distance
        self._first_lr = self._first_lr or like._first_lr

    def count(self, optimizer: Optimizer) -> None:
        """Count one step, before or after the optimizer makes it."""
        group = optimizer.param_groups[0]
        lr, momentum = float(group["lr"]), float(group.get("momentum", 0.0))
        if not self._first_lr:
            self._first_lr = lr
        if self._is_first:  # it fills the momentum buffer undampened
            self._is_first, self._velocity = False, 1.0
        else:
            self._velocity = momentum * self._velocity + 1.0 - float(group.get("dampening", 0.0))
        self.distance += lr * (1.0 + momentum * self._velocity if group.get("nesterov") else self._velocity)
