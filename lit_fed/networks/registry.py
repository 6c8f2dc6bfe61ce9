"""Networks by name, and uniform access to their features and classifiers."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from torch import Tensor, nn
from torch.torch_version import TorchVersion

from lit_fed.checks import check_range
from lit_fed.errors import ConfigError, reason
from lit_fed.networks.basic import MLP, VGG11, Logistic, McMahanCNN, MobileNet, ResNet18Cifar, SmallCNN, WindowCNN
from lit_fed.networks.text import BertTiny, EmbeddingBag
from lit_fed.wings import of_wing

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "small_cnn": SmallCNN,
    "mlp": MLP,
    "logistic": Logistic,
    "window_cnn": WindowCNN,
    "mcmahan_cnn": McMahanCNN,
    "vgg11": VGG11,
    "mobilenet": MobileNet,
    "resnet18_cifar": ResNet18Cifar,
    "embedding_bag": EmbeddingBag,
    "bert_tiny": BertTiny,
}
"""Our own networks by name; they come before timm's. Each takes num_classes, in_channels, input_shape and head_bias."""

_PATIENCE_S = 5.0  # time-out of a server of weights

TEXT_NETWORKS = ("embedding_bag", "bert_tiny")
"""Networks that read rows of token ids."""

WINDOW_NETWORKS = ("window_cnn",)
"""Networks that read windows of sensors, (channels, steps); all others read images."""

POSE_NETWORKS = ("pose_vit_small", "pose_vit_tiny", "pose_cnn", "pose_resnet", "fcn_resnet50")
"""Networks of `lit_fed.poses`, by name, which output a map for each joint or class; num_classes is their number."""


def build_network(
    name: str, num_classes: int, in_channels: int, input_shape: tuple[int, ...] | None = None, **kwargs: Any
) -> nn.Module:
    """Build a network by name: one of ours, or any of timm's.

    Args:
        name: A key of `NETWORKS`, one of `POSE_NETWORKS`, or a timm model such as ``"resnet18"``.
        num_classes: Length of the output; of a pose network, its joints.
        in_channels: Channels of the input.
        input_shape: Shape of one example, channels first. A timm model with a fixed image size takes (height, width)
            from the shape; without it, the model keeps its default.
        kwargs: Further settings of the network, such as ``width=32`` or, for timm, ``pretrained=True``, which
            downloads weights.

    Returns:
        A module that maps (B, *input_shape) to (B, num_classes), a pose network to (B, num_classes, h, w), with fresh
        weights from torch's global generator.

    Raises:
        ConfigError: If there is no such network, or it does not take these settings.
    """
    if input_shape is not None:
        input_shape = tuple(input_shape)
    if name in NETWORKS:
        return _build_own(name, NETWORKS[name], num_classes, in_channels, input_shape, kwargs)
    if name in POSE_NETWORKS:
        made = of_wing("poses.networks").NETWORKS[name]  # imports timm, see `_build_timm`
        return _build_own(name, made, num_classes, in_channels, input_shape, kwargs)
    return _build_timm(name, num_classes, in_channels, input_shape, kwargs)


def features(network: nn.Module, x: Tensor) -> Tensor:
    """The vectors that a network's classifier sees, (B, d).

    Args:
        network: One of our networks, a timm model, or any module whose `forward_features` yields (B, d).
        x: A batch, (B, *input_shape).

    Raises:
        ConfigError: If the network has no `forward_features`, or it does not yield flat features.
    """
    forward_features = getattr(network, "forward_features", None)
    if forward_features is None:
        raise ConfigError(
            f"network {type(network).__name__} has no forward_features; add forward_features(x) -> (B, d), or choose "
            "a network of lit_fed or timm"
        )
    pooled: Tensor = forward_features(x)
    # In timm, forward_features yields a map or tokens; pooling them is the first half of forward_head.
    forward_head = getattr(network, "forward_head", None)
    if forward_head is not None:
        pooled = forward_head(pooled, pre_logits=True)
    if pooled.ndim != 2:
        raise ConfigError(
            f"network {type(network).__name__} yields features of shape {tuple(pooled.shape)}; forward_features must "
            "yield (batch, features)"
        )
    return pooled


def classifier(network: nn.Module) -> nn.Module:
    """A network's last layer, which maps its `features` to logits.

    Args:
        network: One of our networks, a timm model, or any module with a `head`.

    Raises:
        ConfigError: If there is no single such layer.
    """
    get_classifier = getattr(network, "get_classifier", None)
    layer = get_classifier() if get_classifier is not None else getattr(network, "head", None)
    if not isinstance(layer, nn.Module):  # timm's distilled models have a pair of heads
        raise ConfigError(
            f"network {type(network).__name__} has no single classifier; give it a layer named head, or choose "
            "another network"
        )
    return layer


def _build_own(
    name: str,
    make: Callable[..., nn.Module],
    num_classes: int,
    in_channels: int,
    input_shape: tuple[int, ...] | None,
    kwargs: dict[str, Any],
) -> nn.Module:
    settings = {"num_classes": num_classes, "in_channels": in_channels, **kwargs}
    if input_shape is not None:
        settings["input_shape"] = input_shape
    signature = inspect.signature(make)
    try:  # against the signature, so that a TypeError from inside the constructor is not mistaken for the user's
        signature.bind(**settings)
    except TypeError as error:
        raise ConfigError(f"network {name!r}: {error}; its settings are {', '.join(signature.parameters)}") from None
    hints = _hints(make)
    for key, value in settings.items():
        if not _fits(value, hints.get(key)):
            raise ConfigError(f"network {name!r}: {key} is {value!r}; it must be {_KINDS[hints[key]]}")
    check_range(f"{getattr(make, '__name__', name)}.in_channels", in_channels, least=1)  # some networks ignore it
    try:
        return make(**settings)
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:  # a value of another type, or out of range
        if not kwargs:
            raise ConfigError(f"network {name!r} cannot be built: {reason(error)}") from error
        given = ", ".join(f"{key}: {value!r}" for key, value in kwargs.items())
        takes = [f"{key}: {parameter.annotation}" for key, parameter in signature.parameters.items() if key in kwargs]
        raise ConfigError(
            f"network {name!r} cannot be built with network_args {{{given}}}: {reason(error)}; it takes "
            f"{', '.join(takes)}"
        ) from error
    except Exception as error:  # any error of a network's constructor
        raise ConfigError(f"network {name!r} cannot be built: {reason(error)}") from error


def _build_timm(
    name: str, num_classes: int, in_channels: int, input_shape: tuple[int, ...] | None, kwargs: dict[str, Any]
) -> nn.Module:
    import timm  # takes seconds, and many runs need none of its models

    if not timm.is_model(name):
        close = difflib.get_close_matches(name, [*NETWORKS, *POSE_NETWORKS, *timm.list_models()], n=3)
        hint = f"did you mean {', '.join(close)}?" if close else f"choose {', '.join(NETWORKS)} or a timm model"
        raise ConfigError(f"network {name!r} is neither in lit_fed nor in timm; {hint}")
    if input_shape is not None and len(input_shape) != 3:
        raise ConfigError(f"network {name!r}: input_shape is {input_shape}; it must be (channels, height, width)")
    for key, value in (("in_channels", in_channels), ("num_classes", num_classes)):
        if value < 1:
            raise ConfigError(f"network {name!r}: {key} is {value}; it must be at least 1")
    settings = {"num_classes": num_classes, "in_chans": in_channels, **kwargs}
    try:
        with _weights_at_hand(name, kwargs) if kwargs.get("pretrained") else nullcontext():
            if input_shape is not None and "img_size" not in settings:
                try:
                    return create_timm(name, img_size=input_shape[1:], **settings)
                except TypeError as error:
                    # timm has no list of the models that take an image size: convolutional ones refuse it here, before
                    # any of their layers is built.
                    if not ("unexpected keyword" in str(error) and "img_size" in str(error)):
                        raise
            return create_timm(name, **settings)
    except ConfigError:
        raise
    except Exception as error:  # any error of timm's constructors
        if isinstance(error, TypeError) and "unexpected keyword" in str(error):
            raise ConfigError(f"network {name!r}: {error}; remove that setting") from None
        raise ConfigError(f"network {name!r} cannot be built: {reason(error)}") from error


@contextmanager
def _weights_at_hand(name: str, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Take pretrained weights from this machine where their server does not answer, without further requests."""
    from huggingface_hub import constants, get_session

    hint = "name a weights file in network_args.pretrained_cfg_overlay.file, or set network_args.pretrained to false"
    overlay = kwargs.get("pretrained_cfg_overlay")
    file = overlay.get("file") if isinstance(overlay, Mapping) else None
    if file is not None and not Path(file).is_file():
        raise ConfigError(f"network {name!r} has no pretrained weights here: {file} does not exist; {hint}")
    before = constants.HF_HUB_OFFLINE
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception:  # any error of the request
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    except OSError as error:
        why = f"they are not on this machine, and {constants.ENDPOINT} does not answer"
        why = why if constants.HF_HUB_OFFLINE else reason(error)
        raise ConfigError(f"network {name!r} has no pretrained weights here: {why}; {hint}") from error
    finally:
        constants.HF_HUB_OFFLINE = before


def create_timm(name: str, **settings: Any) -> nn.Module:
    """Build a network of timm; pretrained weights need a timm that runs no pickles and reads files for its own."""
    import timm

    if (settings.get("pretrained") or settings.get("checkpoint_path")) and TorchVersion(timm.__version__) < "1.0.31":
        raise ConfigError(f"network {name!r}: pretrained weights need timm 1.0.31, not {timm.__version__}; upgrade it")
    network: nn.Module = timm.create_model(name, **settings)
    if getattr(getattr(network, "patch_embed", None), "num_patches", None) == 0:  # timm builds it, but it cannot run
        raise ConfigError(
            f"network {name!r} has no patch in an image of {settings.get('img_size')} pixels; choose a smaller "
            "patch_size or larger images"
        )
    return network


_KINDS: dict[Any, str] = {
    int: "a whole number",
    bool: "true or false",
    str: "a text",
    str | None: "a text or null",
    Sequence[int]: "a list of whole numbers",
}
"""The types of settings of our own networks, in words."""


def _hints(make: Callable[..., nn.Module]) -> dict[str, Any]:
    """The types of a network's settings."""
    made: Any = make.func if isinstance(make, partial) else make
    return get_type_hints(made.__init__ if isinstance(made, type) else made)  # type: ignore[misc]  # of the class itself


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a setting's type; true where `_KINDS` does not list the type."""
    if hint in (int, bool, str):
        return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    if hint == str | None:
        return value is None or isinstance(value, str)
    if hint == Sequence[int]:
        return isinstance(value, list | tuple) and all(_fits(item, int) for item in value)
    return True
