"""The adapters of a network in the format of peft, whose ``PeftModel.from_pretrained`` reads a folder of two files."""

from __future__ import annotations

import json

from safetensors.torch import save
from torch import Tensor, nn

from lit_fed.errors import ConfigError
from lit_fed.networks.adapters import LoRALinear, adapters_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
USE = """from peft import PeftModel
network = PeftModel.from_pretrained(base, ".")  # base: the network before the adapters, with the weights that it had"""
_PREFIX = "base_model.model."


def peft_files(network: nn.Module) -> dict[str, bytes]:
    """The two files of a network with adapters, by name.

    Parameters beside the adapters that train, such as the head, are ``modules_to_save``.

    Raises:
        ConfigError: For adapters that peft has no form for.
    """
    found = adapters_of(network)
    state: dict[str, Tensor] = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    for one in found:
        if not isinstance(network.get_submodule(one.base.rpartition(".")[0]), LoRALinear):
            raise ConfigError(f"peft has no adapter for a weight that attention reads itself, such as {one.base}")
    ranks = {len(state[one.lora_a]) for one in found}
    if len(ranks) > 1 or len({one.scale for one in found}) > 1:
        raise ConfigError("the adapters differ in their rank or scale")
    factors = {name for one in found for name in (one.lora_a, one.lora_b)}
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad} - factors
    saved = sorted({name.rpartition(".")[0] for name in trained})
    if adapted := [module for module in saved if isinstance(network.get_submodule(module), LoRALinear)]:
        raise ConfigError(f"peft has no form for {adapted[0]}, which trains and has an adapter")
    tensors = {f"{_PREFIX}{name}.weight": state[name] for name in factors}
    tensors |= {_PREFIX + name: tensor for name, tensor in state.items() if name.rpartition(".")[0] in saved}
    (rank,) = ranks
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": found[0].scale * rank, "lora_dropout": 0.0, "bias": "none",
        "target_modules": [one.base.removesuffix(".weight") for one in found], "modules_to_save": saved or None,
        "base_model_name_or_path": None, "task_type": None, "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    contents = {name: tensor.clone().contiguous() for name, tensor in sorted(tensors.items())}
    return {CONFIG: (json.dumps(config, indent=2) + "\n").encode(), WEIGHTS: save(contents, metadata={"format": "pt"})}
