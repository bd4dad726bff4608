"""The check that the library computes a model correctly: on a small random twin, it must agree with transformers."""

import copy
from typing import Any

import torch
from torch import Tensor

from medusa_cli.engine.describe import describe
from medusa_cli.engine.description import Description
from medusa_cli.engine.experts import BIAS
from medusa_cli.engine.native_engine import NativeEngine
from medusa_cli.engine.native_model import NativeModel
from medusa_cli.engine.packed import pack_in_memory
from medusa_cli.engine.probes import rotary_of
from medusa_cli.errors import UserError, first_line
from medusa_cli.model.backbone import (
    Backbone,
    Unsupported,
    has_tied_head,
    padded_pass,
    take_own_attention,
    text_config,
    text_model,
    usable_positions,
)
from medusa_cli.model.checks import FAULTS, check_network, probe_tokens
from medusa_cli.model.weights import NetworkWeights

# Tokens of a pass over the twin.
TOKENS = 20
# The twin's attention window, which is shorter than a pass; its soft cap, which scores exceed; and
# its limit for queries, keys and values, which these exceed.
BOUNDS = {"sliding_window": 7, "attn_logit_softcapping": 2.0, "clip_qkv": 1.0}
# The number of the twin's layers. In Gemma 3's pattern, this many layers include sliding and full attention.
LAYERS = 7
# Upper bounds for other sizes in configs.
SMALLER = {
    "hidden_size_per_layer_input": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_topk": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "shared_intermediate_size": 96,
}
# This is subtracted from A_log: delta nets then forget slowly, by exp(A_log), and their states matter.
SLOW = 3
# The largest allowed relative difference of the twin's states.
TOLERANCE = 1e-4


def verified(network: Any) -> Description:
    """Describes a network once the library has reproduced transformers' states on its twin.

    Raises Unsupported if parts are unknown or states differ.
    """
    try:
        description = describe(network)
        twin = twin_of(network)
        check_network(twin, network.config.name_or_path)
        of_twin = describe(twin)
        if of_twin.flags != description.flags or not of_twin.routing.is_like(description.routing):
            raise Unsupported("a small network of its config has other kinds of layers")
        _compare(twin, of_twin)
    except (Unsupported, torch.OutOfMemoryError):
        raise
    except (UserError, *FAULTS) as reason:
        raise Unsupported(first_line(reason)) from reason
    return description


def twin_of(network: Any) -> Any:
    """Returns a small network with random fp32 weights and the same kinds of layers as a network."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        twin = _built(network, _small_config(network))
        _randomize(twin)
        twin._apply(_without_memory)
    take_own_attention(twin)  # a backbone's network may use this package's attention
    return twin.eval()


def _small_config(network: Any) -> Any:
    """Returns a text config of the same kinds of layers and groups of heads as a network's, with small sizes."""
    config = copy.deepcopy(text_config(network.config))
    heads = config.num_attention_heads
    groups = heads // (getattr(config, "num_key_value_heads", None) or heads)
    kinds = getattr(config, "layer_types", None)
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    chosen = _chosen_kinds(kinds, shared) if kinds else []
    by_kind = _fields_by_kind(config)
    changes = {
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 64,
        "vocab_size_per_layer_input": 64,
        "num_hidden_layers": len(chosen) or min(config.num_hidden_layers, LAYERS),
        "num_attention_heads": 2 * groups,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": has_tied_head(network),
    }
    if by_kind:
        config.per_layer_config = None
    for name, value in changes.items():
        setattr(config, name, value)
    for name, largest in SMALLER.items():
        if isinstance(value := getattr(config, name, None), int):
            setattr(config, name, min(value, largest))
    if values := getattr(config, "linear_num_value_heads", None):
        config.linear_num_value_heads = 2 * values // config.linear_num_key_heads
        config.linear_num_key_heads = 2
    if chosen:
        config.layer_types = chosen
    if shared:
        config.num_kv_shared_layers = len(set(chosen))
    if by_kind:
        for fields in by_kind.values():
            kv = fields.get("num_key_value_heads")
            if kv is not None:
                fields["num_key_value_heads"] = max(1, 2 * groups * kv // heads)
        config.per_layer_config = {
            index: dict(by_kind[kind]) for index, kind in enumerate(config.layer_types)
        }
    for name, value in BOUNDS.items():
        if getattr(config, name, None):
            setattr(config, name, value)
    return config


def _randomize(twin: Any) -> None:
    """Draws a twin's weights, and the buffers that a checkpoint would fill."""
    for name, parameter in twin.named_parameters():
        if parameter.is_meta:
            continue
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.2)
        if parameter.dim() == 1:
            parameter.data += 1 - SLOW * name.endswith("A_log")
    for name, values in twin.named_buffers():
        if values.is_meta:
            continue
        if name.endswith(BIAS):
            values.copy_(torch.randn_like(values) / 10)
        if name.endswith("layer_scalar"):
            values.copy_(torch.rand_like(values) + 0.5)


def _without_memory(tensor: Tensor) -> Tensor:
    """Returns zeros that use no memory for a tensor on the meta device, and any other tensor unchanged."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) if tensor.is_meta else tensor


def _chosen_kinds(kinds: list[str], shared: int) -> list[str]:
    """Returns the kinds of a twin's layers; every kind occurs, also among layers that share keys."""
    if shared:
        own = kinds[:-shared]
        last = max(own.index(kind) for kind in set(kinds))
        return [*own[: last + 1], *sorted(set(kinds), reverse=True)]
    # The network's last layers may have kinds that its first layers lack.
    first = kinds[:LAYERS]
    missing = [kind for kind in dict.fromkeys(kinds) if kind not in first]
    return [*first, *missing]


def _fields_by_kind(config: Any) -> dict[str, dict[str, Any]]:
    """Returns a config's per-layer fields by kind of layer; the result is empty if it has none."""
    names = getattr(config, "per_layer_attributes", None)
    if not names:
        return {}
    return {
        kind: {name: getattr(config.per_layer_config[index], name, None) for name in names}
        for index, kind in enumerate(config.layer_types)
    }


def _built(network: Any, config: Any) -> Any:
    """Builds a network of the same class for another text config, in fp32.

    Vision modules are on the meta device, since text does not pass through them.
    """
    kind = type(network)
    own = network.config.get_text_config()
    if own is network.config:
        return kind._from_config(config, dtype=torch.float32)
    whole = copy.deepcopy(network.config)
    field = next(name for name, value in vars(network.config).items() if value is own)
    setattr(whole, field, config)
    with torch.device("meta"):
        twin = kind._from_config(whole, dtype=torch.float32)
    text = text_model(twin)
    name = next(name for name, module in twin.named_modules() if module is text)
    twin.set_submodule(name, type(text)._from_config(config, dtype=torch.float32))
    head = twin.get_output_embeddings()
    linear = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=head.bias is not None)
    twin.set_output_embeddings(linear)
    if config.tie_word_embeddings:
        linear.weight = twin.get_input_embeddings().weight
    return twin


@torch.inference_mode()
def _compare(twin: Any, description: Description) -> None:
    """Raises Unsupported unless the library reproduces a twin's logits and its states at both ends of its context."""
    packed = pack_in_memory(description, NetworkWeights(twin), None, False)
    backbone = Backbone(twin)
    context = usable_positions(backbone.config)
    model = NativeModel(description, packed, rotary_of(twin), context)
    engine = NativeEngine(backbone, model, False)
    tokens = probe_tokens(backbone.vocab_size, TOKENS)

    # A twin's window is short, but its context is as long as the model's.
    for first in (0, max(0, context - TOKENS)):
        positions = first + torch.arange(TOKENS)[None]
        expected = padded_pass(backbone, tokens[None], position_ids=positions).last_hidden_state[0]
        states = engine.states_at(tokens, first)
        error = float((states - expected).norm() / expected.norm())
        if not error <= TOLERANCE:
            raise Unsupported(
                f"its states differ from the network's own by {error:.2%} from position {first:,} on"
            )

    expected_logits = backbone.finish_logits(twin.get_output_embeddings()(expected))
    logits = engine.logits_of(expected)
    if not torch.allclose(expected_logits, logits, atol=1e-4 * float(expected_logits.abs().max())):
        raise Unsupported("its logits are not its lm_head's own")
