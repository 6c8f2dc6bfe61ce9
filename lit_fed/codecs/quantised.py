"""Few bits for each value, in rows of values that share a scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Size, Tensor
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.codecs.compressor import Compressor, pack, unpack
from lit_fed.errors import WireError


class _Quantised(Compressor):
    """Sends each value as a multiple of the scale of its row, by stochastic rounding to 2s + 1 levels.

    On the wire a tensor is one vector of bytes: the rows' scales, of 4 bytes (8 for float64), and then the codes.

    Args:
        levels: s, levels above 0.
        difference: See `Compressor`.
        feedback: See `Compressor`.
    """

    order: float
    """Of the norm of a row that is its scale."""

    def __init__(self, levels: int, difference: bool = True, feedback: bool = False) -> None:
        super().__init__(difference, feedback)
        self.levels, self.bits = levels, (2 * levels).bit_length()

    def _width(self, shape: Size) -> int:
        """Values in a row; the last row may have fewer."""
        return shape.numel()

    def _codes(self, rows: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
        ratio = (rows.abs() / scale).nan_to_num_(0.0) * self.levels  # a row of zeros has scale 0
        drawn = torch.rand(ratio.shape, generator=generator, dtype=ratio.dtype, device="cpu").to(ratio.device)
        level = (ratio.floor() + (drawn < ratio.frac())).clamp_(max=self.levels)
        return (level * rows.sign() + self.levels).to(torch.int64)

    def _values(self, codes: Tensor) -> Tensor:
        return (codes - self.levels) / self.levels

    @override
    def compress(self, tensor: Tensor, generator: torch.Generator) -> Mapping[str, Tensor]:
        rows = _rows(tensor.reshape(-1).to(torch.promote_types(tensor.dtype, torch.float32)), self._width(tensor.shape))
        scale = torch.linalg.vector_norm(rows, self.order, 1, keepdim=True, dtype=torch.float64).to(rows.dtype)
        codes = self._codes(rows, scale, generator).reshape(-1)[: tensor.numel()]
        return {"codes": torch.cat([scale.reshape(-1).view(torch.uint8), pack(codes, self.bits)])}

    @override
    def expand(self, parts: Mapping[str, Tensor], like: Tensor, generator: torch.Generator) -> Tensor:
        packed, width, size = parts["codes"], self._width(like.shape), like.numel()
        wide = torch.promote_types(like.dtype, torch.float32)
        scales = -(-size // width) * wide.itemsize
        if packed.dtype != torch.uint8 or packed.ndim != 1 or len(packed) < scales:
            raise WireError("a tensor on the wire lacks its scales; use the same codec on both ends")
        scale = packed[:scales].clone().view(wide).unsqueeze(1)
        values = self._values(unpack(packed[scales:], self.bits, size)).to(wide)
        return (_rows(values, width) * scale).reshape(-1)[:size].to(like.dtype)


class QSGD(_Quantised):
    r"""Sends each value as a stochastic multiple of its bucket's norm: unbiased (Alistarh et al., NeurIPS 2017).

    .. math:: Q_s(v_i) = \lVert v \rVert_2 \, \mathrm{sgn}(v_i) \, \xi_i, \qquad
        \mathbb{E} \lVert Q_s(v) - v \rVert^2 \le \min(d/s^2, \sqrt d / s) \, \lVert v \rVert^2

    with :math:`\xi_i` one of the two neighbours of :math:`|v_i| / \lVert v \rVert` among 0, 1/s, …, 1, and d the size
    of a bucket.

    Args:
        levels: s; a value takes :math:`\lceil \log_2 (2s + 1) \rceil` bits: 4 for 7 levels.
        bucket: d, the number of consecutive values of a tensor that share a norm, of 4 bytes.
        difference: Pack the difference of a client's tensor to the broadcast's of the same name, where there is one.
        feedback: Error feedback, see `TopK`.

    Note:
        Codes have a fixed length; the paper's Elias codes are shorter where most values are 0.
    """

    order = 2.0

    def __init__(self, levels: int = 7, bucket: int = 512, difference: bool = True, feedback: bool = False) -> None:
        super().__init__(check_range("QSGD.levels", levels, least=1, most=2**15), difference, feedback)
        self.bucket = check_range("QSGD.bucket", bucket, least=1)

    @override
    def _width(self, shape: Size) -> int:
        return min(self.bucket, shape.numel())


class Int8(_Quantised):
    r"""Sends each value in 8 or 4 bits, of its channel's largest absolute value: unbiased.

    A channel is a slice along a tensor's first dimension, and the whole tensor if it has one dimension. Its largest
    value is 127 levels (7 in 4 bits). Rounding is stochastic, and a value is off by less than 1/127 of the largest.

    Args:
        bits: 8 or 4.
        difference: Pack the difference of a client's tensor to the broadcast's of the same name, where there is one.
        feedback: Error feedback, see `TopK`.
    """

    order = torch.inf

    def __init__(self, bits: Literal[8, 4] = 8, difference: bool = True, feedback: bool = False) -> None:
        super().__init__(2 ** (bits - 1) - 1, difference, feedback)

    @override
    def _width(self, shape: Size) -> int:
        return shape.numel() // shape[0] if len(shape) > 1 else shape.numel()


class SignSGD(_Quantised):
    r"""Sends signs, of one bit each, and the 1-norm of each tensor (Bernstein et al., ICML 2018).

    .. math:: C(x) = \lVert x \rVert_1 / d \cdot \mathrm{sgn}(x)

    Signs are biased, so error feedback is on: EF-signSGD (Karimireddy et al., ICML 2019).

    Args:
        difference: Pack the difference of a client's tensor to the broadcast's of the same name, where there is one.
        feedback: Error feedback, see `TopK`.

    Note:
        The server averages what arrives; it takes no majority vote. The sign of 0 is 1.
    """

    order = 1.0

    def __init__(self, difference: bool = True, feedback: bool = True) -> None:
        super().__init__(1, difference, feedback)
        self.bits = 1

    @override
    def _codes(self, rows: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
        return (rows < 0).to(torch.int64)

    @override
    def _values(self, codes: Tensor) -> Tensor:
        return (1 - 2 * codes) / len(codes)


def _rows(flat: Tensor, width: int) -> Tensor:
    """A vector in rows of a width, filled up with zeros."""
    return torch.nn.functional.pad(flat, (0, -len(flat) % width)).view(-1, width)
