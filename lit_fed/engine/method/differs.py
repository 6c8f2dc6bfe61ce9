"""A placeholder of a value that a computation for several clients cannot have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch.utils._pytree import tree_flatten


class Differs:
    """Stands for a value that differs between the clients of one computation; refuses every use.

    Args:
        refusal: Makes the error to raise.
    """

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        self._refusal = refusal

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise self._refusal()

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse an operation of torch, by the first placeholder among its arguments."""
        for leaf in tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, Differs):
                leaf._refuse()
        raise TypeError("an operation of torch got a placeholder inside another object")

    __int__ = __index__ = __float__ = __bool__ = __hash__ = __str__ = __len__ = __iter__ = __getitem__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __matmul__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __truediv__ = __floordiv__ = _refuse
    __abs__ = __round__ = __trunc__ = __floor__ = __ceil__ = __divmod__ = __rdivmod__ = __and__ = _refuse
    __rtruediv__ = __rfloordiv__ = __pow__ = __rpow__ = __rmod__ = __rmatmul__ = _refuse
