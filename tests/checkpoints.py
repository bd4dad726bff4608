"""Checkpoints of other tools, tiny and random, as their own code lays them out."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa_cli.drafters import load_drafter
from medusa_cli.drafters.base import NewTokens
from medusa_cli.model import Backbone
from tests.helpers import TREE, drafted

H, V = 32, 64


def medusa_heads(
    heads: int = 3, layers: int = 2, *, vocabulary: int | None = V, dtype=torch.float16
) -> dict[str, Tensor]:
    """FasterDecoding's state dict; vocabulary None: its second form, which has no matrices."""
    torch.manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for k in range(heads):
        for layer in range(layers):
            tensors[f"{k}.{layer}.linear.weight"] = 0.1 * torch.randn(H, H)
            tensors[f"{k}.{layer}.linear.bias"] = 0.1 * torch.randn(H)
        if vocabulary:
            tensors[f"{k}.{layers}.weight"] = torch.randn(vocabulary, H)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def vllm_names(tensors: dict[str, Tensor], layers: int = 2) -> dict[str, Tensor]:
    """The same heads under vLLM's own names."""
    renamed = {}
    for name, tensor in tensors.items():
        k, layer, *rest = name.split(".")
        renamed[
            f"lm_heads.{k}.weight"
            if int(layer) == layers
            else f"blocks.{k}.layers.{layer}.{rest[-1]}"
        ] = tensor
    return renamed


def hydra_heads(heads: int = 3, layers: int = 2) -> dict[str, Tensor]:
    """The state dict of the authors' grounded heads."""
    torch.manual_seed(4)
    tensors: dict[str, Tensor] = {"input_embed_fn.weight": torch.randn(V, H)}
    for k in range(heads):
        for name in ("linear", "res_connection"):
            tensors[f"hydra_mlp.{k}.0.{name}.weight"] = 0.1 * torch.randn(H, (k + 2) * H)
            tensors[f"hydra_mlp.{k}.0.{name}.bias"] = 0.1 * torch.randn(H)
        for layer in range(1, layers):
            tensors[f"hydra_mlp.{k}.{layer}.linear.weight"] = 0.1 * torch.randn(H, H)
            tensors[f"hydra_mlp.{k}.{layer}.linear.bias"] = 0.1 * torch.randn(H)
        tensors[f"hydra_lm_head.{k}.weight"] = torch.randn(V, H)
        tensors[f"hydra_lm_head.{k}.bias"] = torch.zeros(V)
    return tensors


EAGLE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": V,
    "draft_vocab_size": 24,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}


def eagle3(config: dict = EAGLE) -> dict[str, Tensor]:
    """An EAGLE-3 drafter of a config's widths, of bf16."""
    torch.manual_seed(5)
    wide, words = config["intermediate_size"], config["draft_vocab_size"]
    head_dim = H // config["num_attention_heads"]
    shared = config["num_key_value_heads"] * head_dim
    layer = {
        "self_attn.q_proj": (H, 2 * H),
        "self_attn.k_proj": (shared, 2 * H),
        "self_attn.v_proj": (shared, 2 * H),
        "self_attn.o_proj": (H, H),
        "mlp.gate_proj": (wide, H),
        "mlp.up_proj": (wide, H),
        "mlp.down_proj": (H, wide),
    }
    tensors = {f"midlayer.{name}.weight": 0.1 * torch.randn(shape) for name, shape in layer.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(H)
    tensors |= {"fc.weight": 0.1 * torch.randn(H, 3 * H), "norm.weight": torch.ones(H)}
    tensors["lm_head.weight"] = torch.randn(words, H)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    if words != V:
        ids = torch.randperm(V)[:words].sort().values
        tensors["d2t"] = ids - torch.arange(words)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write(folder: Path, file: str, tensors: dict[str, Tensor], config: dict | None = None) -> Path:
    """A checkpoint's folder: its weights as safetensors or as a torch file, and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def draft_of(drafter: Path, backbone: Backbone) -> tuple[list[int], Tensor, int]:
    """Returns what the drafter of a folder drafts after some states, those states, and the root."""
    own = load_drafter(drafter, backbone)
    torch.manual_seed(8)
    hidden, root = torch.randn(1, backbone.hidden_size * len(own.taps)), 11
    draft = drafted(own, backbone, NewTokens(torch.tensor([5]), hidden, root, 0), TREE)
    return draft.tokens.tolist(), hidden, root
