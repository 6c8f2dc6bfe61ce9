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
from typing_extensions import override

from lit_fed.engine.method.model import Differs
from lit_fed.engine.vectorized.layers import GroupLayers
from lit_fed.private_names import TorchDispatchMode, lacks, tree_leaves, tree_map

_MANY = 10_007  # a prime: a dimension over samples is known by its size
_MOST = 2**14  # proofs that are kept
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
    "fill", "copy", "masked_fill", "rsub", "hardswish", "_prelu_kernel", "log_sigmoid_forward", "where", "stack",
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


class Count(torch.SymInt):
    """A multiple of the number of samples, which a task may use as a size, and for nothing else.

    Args:
        factor: The multiple.
    """

    def __init__(self, factor: int) -> None:
        super().__init__(Differs(self._refuse))  # type: ignore[arg-type]  # every use of it is refused
        self.factor = factor

    def _refuse(self, *_args: Any) -> NoReturn:
        raise Unproven("the task uses the number of samples in a batch")

    def __mul__(self, other: Any) -> Count:  # type: ignore[override]  # as all of these
        return Count(self.factor * other) if type(other) is int and other > 0 else self._refuse()

    @override
    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return self.factor == other.factor if isinstance(other, Count) else self._refuse()

    @override
    def __hash__(self) -> int:
        return hash(("samples", self.factor))

    __rmul__ = __mul__  # type: ignore[assignment]
    __index__ = __int__ = __float__ = __bool__ = _refuse


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
            if len(_PROOFS) > _MOST:
                _PROOFS.clear()
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
        if TorchDispatchMode is object:
            raise Unproven(f"kernels cannot be seen, as {lacks('torch', 'TorchDispatchMode')}")
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
            if func in (F.cross_entropy, F.nll_loss):
                call = inspect.signature(func).bind(*given, **named).arguments
                if any(call.get(key) is not None for key in ("weight", "size_average", "reduce")):
                    raise Unproven("a loss weighs classes")
                if call.get("reduction", "mean") == "mean":
                    (_, leaf), target = follow.kind(call["target"]), call["target"]
                    if leaf is None and not target.is_floating_point():
                        raise Unproven("a loss may ignore targets that are computed")
                    ignored = None if leaf is None else (leaf, int(call.get("ignore_index", _IGNORED)))
                    out = func(**call | {"reduction": "none"}).mean()
                else:
                    out = func(*given, **named)
            else:
                out = _INSTEAD.get(func, func)(*given, **named)
        if type(out) is int:
            return _Proof([], [], _counted(out), None, False)
        if isinstance(out, tuple) and all(type(size) is int for size in out):
            return _Proof([], [], tuple(map(_counted, out)), None, False)
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        found = [(tensor, *follow.kind(tensor)) for tensor in tensors]
        kinds = [None if kind == "same" else _Kind(tuple(t.shape), t.dtype, kind, leaf) for t, kind, leaf in found]
        shapes = [tuple(s // _MANY if s and s % _MANY == 0 else s for s in tensor.shape) for tensor in tensors]
        return _Proof(kinds, shapes, None, ignored, counts)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, which itself joins dimensions for its product."""
    product = (input.unsqueeze(-2) * weight).sum(-1)
    return product if bias is None else product + bias


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Another function of each value alone: ``torch.vmap`` refuses random numbers, and `GroupDropout` draws them."""
    return input.abs() if training else input


_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {F.linear: _linear, F.dropout: _dropout}


def _of_one(value: Any) -> Any:
    return value.factor if isinstance(value, Count) else value


def _counted(size: int) -> Any:
    return Count(size // _MANY) if size and size % _MANY == 0 else size


class _Kernels(TorchDispatchMode):  # type: ignore[misc]  # of torch, or object
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
        kinds, packet = [self.kind(tensor) for tensor in given], str(func.overloadpacket.__name__)
        out = func(*args, **(kwargs or {}))
        found = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        name = packet.rstrip("_") if func.namespace == "aten" else str(func)
        held = [(tensor, kind) for tensor, (kind, _) in zip(given, kinds, strict=True)]
        kind = _Call(name, torch.Tag.pointwise in func.tags, args, kwargs or {}, held).judged(found)
        is_same = len(given) == 1 and name in _MOVED and not given[0].is_floating_point()
        is_same = is_same and all(tensor.dtype in (given[0].dtype, torch.int64) for tensor in found)
        if packet.endswith("_") and any(leaf is not None for _, leaf in kinds):
            raise Unproven("a tensor of the batch is changed in place")
        for idx, tensor in enumerate(found):
            lost = kind == "rows" and not _places(tensor)
            if lost and not idx:
                raise Unproven(f"{name} joins samples")
            self._held[id(tensor)] = tensor, "mixed" if lost else kind, kinds[0][1] if is_same else None
        return out


def _places(tensor: Tensor) -> list[int]:
    return [place for place, size in enumerate(tensor.shape) if size and size % _MANY == 0]


class _Call(NamedTuple):
    """A call of a kernel.

    Args:
        name: The kernel's, without the mark of an operation in place.
        is_pointwise: As torch tells.
        args: By place.
        kwargs: By name.
        given: Its tensors and their kinds.
    """

    name: str
    is_pointwise: bool
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    given: Sequence[tuple[Tensor, str]]

    def judged(self, outputs: Sequence[Tensor]) -> str:
        """The kind of the outputs.

        Raises:
            Unproven: If it is not known.
        """
        kinds = {kind for _, kind in self.given} - {"same"}
        sized = any(map(_places, outputs))
        if len(kinds) > 1 or any(len(_places(tensor)) > 1 for tensor in outputs):
            kind = None
        elif not kinds:
            known = not self._numbers() and (not sized or self.name in _MADE)
            kind = ("rows" if sized else "same") if known else None
        elif "rows" in kinds:
            kind = self._of_rows([tensor for tensor, kind in self.given if kind == "rows"], outputs)
        else:
            kind = self._of_means(kinds.pop()) if all(t.is_floating_point() for t in outputs) and not sized else None
        if kind is None:
            raise Unproven(f"{self.name} joins samples, or is not known")
        return kind

    def _of_rows(self, rows: Sequence[Tensor], outputs: Sequence[Tensor]) -> str | None:
        name, first, at = self.name, rows[0], _places(rows[0])[0]
        width, come_first = first.shape[at], all(_places(tensor) == [0] for tensor in rows)
        if any(tensor.shape[_places(tensor)[0]] != width for tensor in rows):
            return None
        if name in _LOSSES:
            reduction = self._argument(_LOSSES[name], "reduction", 1)
            known = come_first and not (reduction == 1 and name.startswith("nll"))
            return ("rows", "mean", "sum")[reduction] if known else None
        if name in _SHAPED:
            outer = [tensor.shape[: _places(tensor)[0]].numel() for tensor in (first, outputs[0]) if _places(tensor)]
            return "rows" if len(outer) == 2 and outer[0] == outer[1] else None
        if name in _DIMS:
            place, default = _DIMS[name]
            dims = self._argument(place, "dim", default)
            dims = dims if isinstance(dims, list | tuple) and dims else _ALL if dims in (None, []) else [dims]
            known = dims != _ALL and at not in [dim % max(first.ndim, 1) for dim in dims]
            if not known and name in ("sum", "mean"):
                return name
            known |= name == "slice" and outputs[0].shape == first.shape
        elif name.startswith(_IMAGES):
            trains = "batch_norm" in name and "no_training" not in name and self._argument(5, "training", True)
            known = come_first and not trains
        elif name == "embedding":
            known = self.args[0] is not first
        elif name == "index":
            known = self.args[0] is not first or (len(rows) == 1 and self.args[1][at : at + 1] in ([], [None]))
        else:
            known = name in _EACH | _MOVED or (self.is_pointwise and not self._numbers())
        alike = all(tensor.shape[place] == width for tensor in outputs for place in _places(tensor))
        return "rows" if known and alike else None

    def _of_means(self, kind: str) -> str | None:
        held = [which != "same" for _, which in self.given]
        if self.name == "div" and kind == "sum" and self._numbers():
            return "mean"
        known = self.name in _LINEAR and not self._numbers() and "rounding_mode" not in self.kwargs
        if self.name in ("mul", "div"):
            known &= sum(held) == 1 and (held[0] or self.name == "mul")
        elif kind == "sum":
            known &= all(held) and (len(held) > 1 or self.name not in ("add", "sub", "rsub"))
        return kind if known else None

    def _argument(self, place: int, name: str, default: Any) -> Any:
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def _numbers(self) -> bool:
        """Whether an argument is a multiple of the number of samples."""
        numbers = [one for one in (*self.args, *self.kwargs.values()) if isinstance(one, int | float)]
        return any(one and one % _MANY == 0 for one in numbers)
