"""One scale for all stored inputs of a population: the value that stands for 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lit_fed.errors import ConfigError

Scale = Literal["bytes", "unit", "signed", "other"]
"""Bytes, of which 255 stands for 1; numbers in [0, 1]; images with numbers below 0; others, in use as they are."""
SCALES: tuple[Scale, ...] = ("bytes", "unit", "signed", "other")
BYTES = np.dtype(np.uint8)
BRIGHTEST = 2.0  # of images scaled to [0, 1], as resizing may overshoot


def scale_of(
    inputs: NDArray[Any], what: str, are_images: bool, max_value: float | None, has_mean: bool
) -> dict[str, Scale]:
    """The scale by an array's dtype and values, under the array's name and range.

    Args:
        inputs: Stored inputs.
        what: The file and the array, for errors.
        are_images: Whether the inputs are images.
        max_value: The setting ``data.max_value``.
        has_mean: Whether ``data.mean`` is set, which allows any numbers.

    Returns:
        Nothing for an empty array, or if the setting decides.

    Raises:
        ConfigError: Images hold other numbers than bytes, and the value of white is ambiguous.
    """
    if not inputs.size:
        return {}
    if inputs.dtype == np.uint8:
        return {} if max_value is not None else {what: "bytes"}
    low, high = inputs.min(), inputs.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        return {}  # refused later, by sample
    found = f"{what} holds {inputs.dtype} from {low:g} to {high:g}"
    if max_value is not None:
        if are_images and inputs.dtype.kind == "f" and max_value > BRIGHTEST and low >= 0 and 0 < high <= 1:
            raise ConfigError(
                f"{found}, which data.max_value {max_value:g} makes black; store all images on one scale, or set it "
                "to null"
            )
        return {}
    if are_images and not has_mean and low >= 0 and high > BRIGHTEST:
        raise ConfigError(
            f"{found}; set data.max_value to the value of white, such as 255, or to 1 to use the values as they are"
        )
    ranged = f"{what} ({low:g} to {high:g})"
    if low < 0:
        return {ranged: "signed" if are_images else "other"}
    return {ranged: "unit" if inputs.dtype.kind == "f" and high <= 1 else "other"}


def common_scale(scales: Mapping[str, Scale | None]) -> Scale | None:
    """The common scale of a population's parts, given by name; parts without a scale are None.

    ``unit`` for bytes beside floating-point numbers in [0, 1]; None if no part has a scale.

    Raises:
        ConfigError: Some parts hold bytes or numbers in [0, 1], and others numbers outside.
    """
    first = {scale: what for what, scale in reversed(list(scales.items())) if scale is not None}
    outside = first.get("other", first.get("signed"))
    if "bytes" in first and outside is not None:
        raise ConfigError(
            f"{outside} holds numbers outside 0 to 1, and {first['bytes']} holds bytes; store both alike, or "
            "set data.max_value to the value that stands for 1 in both"
        )
    if "unit" in first and "signed" in first:
        raise ConfigError(
            f"{first['signed']} holds numbers below 0, and {first['unit']} holds numbers in 0 to 1 alone; store all "
            "images on one scale, or set data.max_value to 1 if they are"
        )
    return next((scale for scale in ("other", "signed", "unit", "bytes") if scale in first), None)


def on_scale(inputs: NDArray[Any], scale: Scale | None) -> NDArray[Any]:
    """Inputs on a population's scale: bytes become numbers in [0, 1] for ``unit``."""
    return inputs.astype(np.float32) / np.float32(255) if inputs.dtype == np.uint8 and scale == "unit" else inputs
