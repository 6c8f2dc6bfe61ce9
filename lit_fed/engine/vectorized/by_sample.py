"""Proof that a batch's values are the means of its samples' values, while samples are taken one by one.

Within ``torch.vmap`` over samples a task sees batches of one sample. `BySample` looks at every operation of torch whose
input depends on samples: it repeats the operation without values, on tensors of torch's ``meta`` device with `_MANY`
samples, and follows their dimension through the kernels that make it up. Known are kernels that take every sample by
itself, a mean over all samples, a sum over all samples that is divided by their number, and what is linear in such
means. Every other use of the samples' dimension raises `Unproven`, and so does a use of the number of samples other
than as a size. Each operation is looked at once in a process: its proof depends on shapes and arguments alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lit_fed.engine.method.model import Differs
from lit_fed.engine.vectorized.layers import GroupLayers

_MANY = 10_007  # a prime: a dimension over samples is known by its size
_IGNORED = -100  # torch's default of ``ignore_index``
_ALL = (None,)
# Kernels by their names in torch. Whose dimensions are an argument: its place, and its default.
_DIMS: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std"), (1, _ALL)),
    **dict.fromkeys(("prod", "any", "all", "logsumexp"), (1, _ALL)),
    **dict.fromkeys(("linalg_vector_norm", "norm"), (2, _ALL)),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cat", "gather", "index_select"), (1, 0)),
    **dict.fromkeys(("select", "slice", "unbind"), (1, 0)),
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split"), (2, 0)),
    **dict.fromkeys(("sort", "glu"), (1, -1)),
    "topk": (2, -1),
}
_SHAPED = {"view", "_unsafe_view", "_reshape_alias"}
_MOVED = _SHAPED | {
    "t", "transpose", "permute", "select", "slice", "split", "split_with_sizes", "unbind", "expand", "squeeze",
    "unsqueeze", "alias", "unsafe_split", "unsafe_chunk", "detach", "clone", "_to_copy", "lift_fresh",
}  # fmt: skip
_EACH = {
    "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "native_layer_norm", "embedding", "index", "constant_pad_nd",
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "zero",
    "fill", "copy", "masked_fill", "rsub", "hardswish", "_prelu_kernel", "log_sigmoid_forward", "native_dropout",
    "bernoulli", "where",
}  # fmt: skip
_IMAGES = (  # beginnings of names: the first dimension is that of samples
    "convolution", "max_pool", "avg_pool", "_adaptive_avg_pool", "adaptive_max_pool", "upsample_", "reflection_pad",
    "replication_pad", "native_group_norm", "native_batch_norm", "_native_batch_norm", "pixel_", "_scaled_dot_product",
)  # fmt: skip
_LOSSES = {
    "mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2, "binary_cross_entropy": 3,
    "nll_loss_forward": 3, "nll_loss2d_forward": 3,
}  # the place of their reduction  # fmt: skip
_MADE = {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "expand", "repeat"}
_LINEAR = _MOVED | {"add", "sub", "rsub", "neg", "mul", "div", "sum", "mean", "stack", "cat"}
_SIZED = _MADE | {"view", "reshape", "unflatten", "broadcast_to", "div", "true_divide"}  # torch's functions


class Unproven(Exception):
    """A batch's values may not be the means of its samples' values."""


class Ignored(Unproven):
    """A loss leaves out a target that occurs in a batch.

    Args:
        leaf: The place of the targets in the batch.
        value: The target.
    """

    def __init__(self, leaf: int, value: int) -> None:
        super().__init__(f"a loss ignores {value}")
        self.leaf, self.value = leaf, value


def _refuse(*_args: Any) -> NoReturn:
    raise Unproven("the task uses the number of samples in a batch")


class Count(torch.SymInt):
    """A multiple of the number of samples, which a task may use as a size, and for nothing else.

    Args:
        factor: The multiple.
    """

    def __init__(self, factor: int) -> None:
        super().__init__(Differs(_refuse))
        self.factor = factor

    def times(self) -> None:
        """Refuse a true multiple, where the number of samples is the default."""
        if self.factor != 1:
            _refuse()

    def __mul__(self, other: Any) -> Count:
        return Count(self.factor * other) if type(other) is int and other > 0 else _refuse()

    @override
    def __eq__(self, other: object) -> bool:
        return self.factor == other.factor if isinstance(other, Count) else _refuse()

    @override
    def __hash__(self) -> int:
        return hash(("samples", self.factor))

    __rmul__, __index__, __int__, __float__, __bool__ = __mul__, _refuse, _refuse, _refuse, _refuse


class _Kind(NamedTuple):
    """A tensor that depends on samples.

    Args:
        shape: With `_MANY` samples.
        dtype: Its dtype.
        kind: ``rows``, those of each sample in order; the ``mean`` or ``sum`` over samples of what a sample alone
            gives; ``mixed`` for others; ``same`` for a tensor that does not depend on samples.
        leaf: The place in the batch of the tensor from which all its values are; None where it is computed.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    leaf: int | None = None


class _Proof(NamedTuple):
    """An operation's outputs.

    Args:
        kinds: Of its tensors; None for one that does not depend on samples.
        shapes: Of its tensors, with one sample.
        number: An output that is a number, or a shape, with `Count`; None for others.
        ignored: The target that it leaves out, and the targets' place in the batch.
        counts: Whether an argument is a `Count`.
    """

    kinds: list[_Kind | None]
    shapes: list[tuple[int, ...]]
    number: Any
    ignored: tuple[int, int] | None
    counts: bool


_PROOFS: dict[Any, _Proof] = {}


class BySample(GroupLayers):
    """Replaces layers as `GroupLayers`, and proves what a task does to samples, within ``torch.vmap`` over them.

    Args:
        depth: Nested ``torch.vmap``.
        holds: Whether a value occurs in a leaf of the batch, as (place, value).
        dropout: As in `GroupLayers`.
    """

    def __init__(
        self, depth: int, holds: Callable[[int, int], bool], dropout: Callable[..., Tensor] | None = None
    ) -> None:
        super().__init__(dropout, by_sample=True)
        self._depth, self._holds = depth, holds
        self._held: dict[int, tuple[Tensor, _Kind]] = {}  # tensors are kept, for their numbers to stay theirs

    def begin(self, sample: Any) -> Any:
        """A batch of one sample, to be followed."""
        self._held.clear()
        batch = tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, sample)
        for place, leaf in enumerate(tree_leaves(batch)):
            if isinstance(leaf, Tensor):
                self._held[id(leaf)] = leaf, _Kind((_MANY, *leaf.shape[1:]), leaf.dtype, "rows", place)
        return batch

    def expect(self, means: Iterable[Tensor], arguments: Iterable[Tensor] = ()) -> None:
        """Refuse values that are not means over samples, and metrics' arguments that are neither rows nor means."""
        for value in means:
            if self._kind(value).kind not in ("mean", "same"):
                raise Unproven("an objective or a logged value is not a mean over samples")
        for value in arguments:
            kind, shape = self._kind(value).kind, self._kind(value).shape
            if not (kind == "mean" if not shape else kind == "rows" and shape[0] % _MANY == 0):
                raise Unproven("a metric takes a value that is not of samples")

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._depends(args) and not self._depends(kwargs.values()):
            return super().__torch_function__(func, types, args, kwargs)
        try:
            key = func, self._described(args), self._described(kwargs)
            proof = _PROOFS.get(key)
        except TypeError as error:
            raise Unproven(str(error)) from error
        if proof is None:
            proof = _PROOFS[key] = self._prove(func, args, kwargs)
        if proof.ignored is not None and self._holds(*proof.ignored):
            raise Ignored(*proof.ignored)
        if proof.counts:
            args, kwargs = tree_map(_of_one, (tuple(args), dict(kwargs)))
        result = super().__torch_function__(func, types, args, kwargs)
        if proof.number is not None:
            return proof.number
        tensors = [result] if isinstance(result, Tensor) else [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for tensor, kind, shape in zip(tensors, proof.kinds, proof.shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise Unproven(f"{resolve_name(func)} gives another shape for one sample than for several")
            if kind is not None:
                self._held[id(tensor)] = tensor, kind
        return result

    def _depends(self, values: Iterable[Any]) -> bool:
        for value in values:
            kind = type(value)
            if kind is tuple or kind is list:
                if self._depends(value):
                    return True
            elif (
                kind is Count
                or id(value) in self._held
                or (kind is slice and Count in (type(value.start), type(value.stop), type(value.step)))
            ):
                return True
        return False

    def _kind(self, tensor: Tensor) -> _Kind:
        held = self._held.get(id(tensor))
        if held is not None:
            return held[1]
        physical = torch.func.debug_unwrap(tensor)
        if physical.ndim - tensor.ndim >= self._depth:
            raise Unproven("an operation cannot be seen")
        return _Kind(tuple(tensor.shape), tensor.dtype, "same")

    def _described(self, value: Any) -> Any:
        """A key of an argument: all on which a proof may depend."""
        if isinstance(value, Tensor):
            return self._kind(value)
        kind = type(value)
        if kind is tuple or kind is list:
            return (kind, *[self._described(one) for one in value])
        if kind is dict:
            return (kind, *[(name, self._described(one)) for name, one in value.items()])
        if kind is slice:
            return kind, self._described((value.start, value.stop, value.step))
        return kind if kind is float else (kind, value)

    def _prove(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Proof:
        name = str(resolve_name(func))
        plain = name.rpartition(".")[2].strip("_")
        leaves = tree_leaves((tuple(args), dict(kwargs)))
        counts = any(isinstance(leaf, Count) for leaf in leaves)
        if name == "None" or (counts and plain not in _SIZED):
            raise Unproven(f"{name} is not known")
        ignored = None
        with ExitStack() as stack:
            stack.enter_context(torch.device("meta"))
            follow = stack.enter_context(_Kernels())

            def many(value: Any) -> Any:
                if isinstance(value, Tensor):
                    return follow.take(self._kind(value))
                if isinstance(value, Count):
                    return value.factor * _MANY
                return torch.device("meta") if isinstance(value, torch.device) else value

            given, named = tree_map(many, (tuple(args), dict(kwargs)))
            if func is F.linear:  # which joins dimensions for its product
                func = _linear
            if func in (F.cross_entropy, F.nll_loss):
                call = inspect.signature(func).bind(*given, **named).arguments
                if any(call.get(key) is not None for key in ("weight", "size_average", "reduce")):
                    raise Unproven("a loss weighs classes")
                if call.get("reduction", "mean") == "mean":
                    if not call["target"].is_floating_point():
                        leaf = follow.kind(call["target"])[1]
                        if leaf is None:
                            raise Unproven("a loss may ignore targets that are computed")
                        ignored = leaf, int(call.get("ignore_index", _IGNORED))
                    out = func(**call | {"reduction": "none"}).mean()
                else:
                    out = func(*given, **named)
            else:
                out = func(*given, **named)
        if type(out) is int or (isinstance(out, tuple) and all(type(size) is int for size in out)):
            return _Proof([], [], _counted(out) if type(out) is int else tuple(map(_counted, out)), None, False)
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        found = [(tensor, *follow.kind(tensor)) for tensor in tensors]
        kinds = [None if kind == "same" else _Kind(tuple(t.shape), t.dtype, kind, leaf) for t, kind, leaf in found]
        shapes = [tuple(s // _MANY if s and s % _MANY == 0 else s for s in tensor.shape) for tensor in tensors]
        return _Proof(kinds, shapes, None, ignored, counts)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = (input.unsqueeze(-2) * weight).sum(-1)
    return product if bias is None else product + bias


def _of_one(value: Any) -> Any:
    return value.factor if isinstance(value, Count) else value


def _counted(size: int) -> Any:
    return Count(size // _MANY) if size and size % _MANY == 0 else size


class _Kernels(TorchDispatchMode):
    """Follows the dimension of samples through the kernels of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[Tensor, str, int | None]] = {}

    def take(self, kind: _Kind) -> Tensor:
        """A tensor of a kind, without values."""
        tensor = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
        self._held[id(tensor)] = tensor, kind.kind, kind.leaf
        if kind.kind == "same" and _places(tensor):
            raise Unproven("a size is too large")
        return tensor

    def kind(self, tensor: Tensor) -> tuple[str, int | None]:
        """A tensor's kind, and the leaf from which its values are."""
        _, kind, leaf = self._held.get(id(tensor), (tensor, "same", None))
        return kind, leaf

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kinds = [self.kind(tensor) for tensor in given]
        before = [tensor.shape for tensor in given]
        out = func(*args, **(kwargs or {}))
        found = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        call = _Call(func, args, kwargs or {}, list(zip(given, before, [kind for kind, _ in kinds], strict=True)))
        kind = call.judged(found)
        leaf = kinds[0][1] if call.keeps_values(found) and len(given) == 1 else None
        if call.name != str(func.overloadpacket.__name__) and any(one is not None for _, one in kinds):
            raise Unproven("a tensor of the batch is changed in place")
        for idx, tensor in enumerate(found):
            lost = kind == "rows" and not _places(tensor)
            if lost and not idx:
                raise Unproven(f"{call.name} joins samples")
            self._held[id(tensor)] = tensor, "mixed" if lost else kind, leaf
        return out


def _places(tensor: Tensor) -> list[int]:
    return [place for place, size in enumerate(tensor.shape) if size and size % _MANY == 0]


class _Call:
    """A call of a kernel.

    Args:
        func: The kernel.
        args: By place.
        kwargs: By name.
        given: Its tensors, their shapes and kinds.
    """

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[tuple[Tensor, Any, str]]
    ) -> None:
        packet = str(func.overloadpacket.__name__)
        self.name = packet.rstrip("_") if func.namespace == "aten" else str(func)
        self.func, self.args, self.kwargs, self.given = func, args, kwargs, given
        self.rows = [tensor for tensor, _, kind in given if kind == "rows"]

    def judged(self, found: Sequence[Tensor]) -> str:
        """The kind of the outputs.

        Raises:
            Unproven: If it is not known.
        """
        kinds = {kind for _, _, kind in self.given} - {"same"}
        if len(kinds) > 1 or "mixed" in kinds or any(len(_places(tensor)) > 1 for tensor in found):
            raise self._unknown()
        sized = any(_places(tensor) for tensor in found)
        if not kinds:
            if (sized and self.name not in _MADE) or self._numbers():
                raise self._unknown()
            return "rows" if sized else "same"
        return self._of_rows(found) if "rows" in kinds else self._of_means(kinds.pop(), sized)

    def keeps_values(self, found: Sequence[Tensor]) -> bool:
        """Whether the outputs hold values of the input."""
        return self.name in _MOVED and found[0].dtype in (self.given[0][0].dtype, torch.int64)

    def _of_rows(self, found: Sequence[Tensor]) -> str:
        name, first = self.name, self.rows[0]
        at = _places(first)[0]
        if len({tensor.shape[_places(tensor)[0]] for tensor in self.rows}) > 1:
            raise self._unknown()
        if torch.Tag.pointwise in self.func.tags and self._numbers():
            raise self._unknown()
        if name in _LOSSES:
            reduction = self._at(_LOSSES[name], "reduction", 1)
            if any(_places(tensor) != [0] for tensor in self.rows) or (reduction == 1 and name.startswith("nll")):
                raise self._unknown()
            return ("rows", "mean", "sum")[reduction]
        if name in _DIMS:
            place, default = _DIMS[name]
            dims = self._at(place, "dim", default)
            dims = dims if isinstance(dims, list | tuple) and dims else _ALL if dims in (None, []) else [dims]
            over = dims == _ALL or at in [dim % max(first.ndim, 1) for dim in dims if dim is not None]
            if over and name in ("sum", "mean"):
                return name
            if over and not (name == "slice" and found[0].shape == first.shape):
                raise self._unknown()
        elif name in _SHAPED:
            (new,) = _places(found[0]) or [-1]
            if new < 0 or first.shape[:at].numel() != found[0].shape[:new].numel():
                raise self._unknown()
            return "rows"
        elif name.startswith(_IMAGES):
            trains = "batch_norm" in name and "no_training" not in name and self._at(5, "training", True)
            if any(_places(tensor) != [0] for tensor in self.rows) or trains:
                raise self._unknown()
        elif name == "embedding" or name == "index":
            whole, *indices = self.args[0], *(self.args[1] if name == "index" else ())
            of_rows = whole is first
            if of_rows and (name == "embedding" or len(self.rows) > 1 or indices[at : at + 1] not in ([], [None])):
                raise self._unknown()
        elif torch.Tag.pointwise not in self.func.tags and name not in _EACH | _MOVED | {"stack"}:
            raise self._unknown()
        width = first.shape[at]
        if any(_places(tensor) and tensor.shape[_places(tensor)[0]] != width for tensor in found):
            raise self._unknown()
        return "rows"

    def _of_means(self, kind: str, sized: bool) -> str:
        if sized or self.name not in _LINEAR:
            raise self._unknown()
        held = [which != "same" for _, _, which in self.given]
        count = self.args[1] if self.name == "div" else None
        is_count = isinstance(count, int | float) and count and count % _MANY == 0
        if kind == "sum" and is_count and self.name == "div":
            return "mean"
        products = self.name in ("mul", "div") and (sum(held) > 1 or (self.name == "div" and not held[0]))
        if products or self._numbers() or (kind == "sum" and self.name in ("add", "sub", "rsub") and sum(held) < 2):
            raise self._unknown()
        if kind == "sum" and not all(held) and self.name in ("stack", "cat"):
            raise self._unknown()
        return kind

    def _at(self, place: int, name: str, default: Any) -> Any:
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def _numbers(self) -> bool:
        """Whether an argument is a multiple of the number of samples."""
        numbers = [one for one in (*self.args, *self.kwargs.values()) if isinstance(one, int | float)]
        return any(one and one % _MANY == 0 for one in numbers)

    def _unknown(self) -> Unproven:
        return Unproven(f"{self.name} joins samples, or is not known")
