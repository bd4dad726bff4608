"""LoRA adapters of a backbone: attached for stage 2, switched off for the original model, saved, and merged."""

import hashlib
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.errors import UserError, first_line
from medusa_cli.files.adapter import MERGE, WEIGHTS, WHAT, read_config, weights_in
from medusa_cli.files.io import replacing_folder
from medusa_cli.files.safetensors_files import read_weights
from medusa_cli.model.backbone import text_model, untie_head

MODELS = "transformers.models."  # transformers defines the parts of each model there
PREFIX = "base_model.model."  # of the names in peft's files
# The end of the name under which peft keeps a copy of a layer's own weight.
OWN_WEIGHT = ".base_layer.weight"


def attach(network: Any, *, rank: int, alpha: float, dropout: float) -> None:
    """Adds new LoRA weights to every linear layer of a network, including the lm_head (Medusa, section 3.2.2).

    The network is changed in place. Call this before the network becomes a Backbone, which freezes its
    weights, and call `unfreeze` afterwards.
    """
    with _quiet():
        from peft import LoraConfig, inject_adapter_in_model

    # A model's own kind of linear layer, such as a router, may return several tensors, so it gets no LoRA weights.
    names = {
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and not type(module).__module__.startswith(MODELS)
    }
    if text_model(network) is network.base_model:
        names = {name.rpartition(".")[2] for name in names}
    else:  # the vision part has layers with the same names
        read = {
            id(module)
            for module in (*text_model(network).modules(), network.get_output_embeddings())
        }
        names = {name for name in names if id(network.get_submodule(name)) in read}
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=sorted(names), bias="none"
    )
    with _quiet():
        inject_adapter_in_model(config, network)
    network.medusa_lora = config  # `save` writes it next to the weights


def unfreeze(network: Any, *, everything: bool = False) -> None:
    """Makes the adapter trainable in fp32 or, with `everything`, all weights of the network."""
    for name, weight in network.named_parameters():
        if "lora_" in name and not everything:
            weight.data = weight.data.float()
        weight.requires_grad_(everything or "lora_" in name)


def trained_weights(network: Any) -> dict[str, nn.Parameter]:
    """Returns the trainable weights of a network by name."""
    return {name: weight for name, weight in network.named_parameters() if weight.requires_grad}


@contextmanager
def adapter_off(network: Any) -> Iterator[None]:
    """Switches the adapter off in a block: the network acts as the original, without a second copy of the weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in network.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def take_up(network: Any, folder: Path) -> None:
    """Copies a saved adapter into the attached adapter, to train it further; raises UserError if shapes differ."""
    weights = {name: weight for name, weight in network.named_parameters() if "lora_" in name}
    keys = {name: "base_model.model." + name.replace(".default.", ".") for name in weights}
    saved = read_weights(folder / WEIGHTS, WHAT)
    if {name: saved[name].shape for name in saved} != {
        keys[name]: weights[name].shape for name in weights
    }:
        fault = f"{WHAT} {folder / WEIGHTS} do not have the shape to be trained"
        raise UserError(fault, "keep train.lora_rank as it was")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved[keys[name]])


def original(layer: Any) -> Any:
    """Returns the linear layer that an adapter wraps, or the layer itself without an adapter."""
    return getattr(layer, "base_layer", layer)


def weight_change(
    layer: Any, rows: Callable[[Tensor], Tensor] = lambda weight: weight
) -> Tensor | None:
    """Returns the change [n, H] that a layer's adapter makes to those rows of its weight [V, H] that `rows` selects.

    Returns None if there is no adapter or it is off.
    """
    from peft.tuners.lora import LoraLayer

    if not isinstance(layer, LoraLayer) or layer.disable_adapters:
        return None
    changes = [
        layer.scaling[name] * (rows(layer.lora_B[name].weight) @ layer.lora_A[name].weight)
        for name in layer.active_adapters
    ]
    return torch.stack(changes).sum(0)


def save(network: Any, folder: Path, backbone: str) -> None:
    """Writes the adapter to a folder in peft's layout; the folder replaces an earlier one once it is complete."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    config = network.medusa_lora
    config.base_model_name_or_path = backbone
    config.inference_mode = True
    # Otherwise peft also saves the lm_head's own weights.
    state = get_peft_model_state_dict(network, adapter_name="default", save_embedding_layers=False)
    with replacing_folder(folder) as part:
        save_file(
            {f"base_model.model.{k}": v.detach().cpu().contiguous() for k, v in state.items()},
            part / WEIGHTS,
        )
        config.save_pretrained(part)


def merge(network: Any, folder: Path, quantized: bool = False) -> Any:
    """Returns the network with a saved adapter, which is merged into the weights unless these are quantized.

    Raises UserError if the adapter does not fit the network.
    """
    weights_in(folder)
    if not quantized:
        # An adapter that is merged into a tied lm_head would change the embeddings, too.
        untie_head(network)
    known = read_config(folder)
    saved = read_weights(folder / WEIGHTS, WHAT)
    copies = _own_weights(network, saved, folder)
    layers = sorted(
        name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in saved if ".lora_" in name
    )
    try:
        with _quiet():
            from peft import LoraConfig, PeftModel

            # Only checked keys are used, because other keys can load models and import modules.
            config = LoraConfig(
                r=known.r,
                lora_alpha=known.lora_alpha,
                target_modules=layers,
                bias="none",
                use_rslora=known.use_rslora,
            )
            config.inference_mode = True
            adapted = PeftModel.from_pretrained(network, str(folder), config=config)
            names = [
                re.sub(r"\.default(?=\.|$)", "", name)
                for name, _ in adapted.named_parameters()
                if "lora_" in name
            ]
            lost = sorted({*names} - {*saved})
            if lost:  # these weights would keep their initial values
                raise ValueError(f"its weights lack {len(lost)} tensors, such as {lost[0]}")
            left = sorted({*saved} - {*names} - copies)
            if left:
                raise ValueError(
                    f"its weights hold {len(left)} tensors that are not taken, such as {left[0]}"
                )
            return network if quantized else adapted.merge_and_unload()
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as reason:
        fault = f"the adapter {folder} does not fit the model: {first_line(reason)}"
        raise UserError(fault, "give the @model it was trained with") from reason


def _own_weights(network: Any, saved: dict[str, Tensor], folder: Path) -> set[str]:
    """Returns the names of the copies of the model's own weights that peft stores with an adapter.

    Raises UserError for a copy that differs from the model's weight.
    """
    modules = dict(network.named_modules())
    copies = {name for name in saved if name.endswith(OWN_WEIGHT)}
    for name in sorted(copies):
        place = name.removeprefix(PREFIX).removesuffix(OWN_WEIGHT)
        own = getattr(modules.get(place), "weight", None)
        if own is None or not torch.equal(saved[name].to(own), own):
            fault = f"the adapter {folder} has its own weight of {place}, which differs from the model's"
            raise UserError(fault, MERGE)
    return copies


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings about tied weights (`untie_head` separates them), adapter keys and a deprecated name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        warnings.filterwarnings("ignore", message="Found missing adapter keys")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        yield


def digest(folder: Path) -> str:
    """Returns the digest of an adapter's weights; raises UserError if the folder has none."""
    return hashlib.sha256(weights_in(folder).read_bytes()).hexdigest()[:16]
