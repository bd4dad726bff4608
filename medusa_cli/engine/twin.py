"""The check that the library computes a model: on a small random twin of it, against transformers' pass."""

import copy
import dataclasses
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from medusa_cli.engine.description import Description, describe, eps_of
from medusa_cli.engine.native import NativeEngine
from medusa_cli.engine.native_model import NativeModel, rotary_of
from medusa_cli.engine.packed import pack_in_memory
from medusa_cli.errors import UserError, first_line
from medusa_cli.model.backbone import Backbone, Layers, Unsupported, padded_pass, usable_positions
from medusa_cli.model.checks import FAULTS, check_network, probe_tokens
from medusa_cli.model.weights import NetworkWeights

# Tokens of a pass over the twin, and its window, which is shorter.
TOKENS = 20
WINDOW = 7
# Layers of the twin: with Gemma 3's pattern, of both kinds.
LAYERS = 7
# The largest difference of its states, relative to their size.
TOLERANCE = 1e-4


def verified(network: Any) -> Description:
    """Describes a network after the library's pass over its twin gave transformers' states.

    Raises Unsupported where parts are unknown or states differ.
    """
    try:
        description = describe(network)
        twin = twin_of(network)
        check_network(twin, network.config.name_or_path)
        one_more = gains_one_more(twin)
        _compare(twin, one_more)
    except (Unsupported, torch.OutOfMemoryError):
        raise
    except (UserError, *FAULTS) as reason:
        raise Unsupported(first_line(reason)) from reason
    return dataclasses.replace(description, one_more=one_more)


def twin_of(network: Any) -> Any:
    """Returns a small network of random fp32 weights whose layers compute as a network's do."""
    config = copy.deepcopy(network.config.get_text_config())
    heads = config.num_attention_heads
    groups = heads // (getattr(config, "num_key_value_heads", None) or heads)
    layers = min(config.num_hidden_layers, LAYERS)
    changes = {
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 2 * groups,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    for name, value in changes.items():
        setattr(config, name, value)
    if kinds := getattr(config, "layer_types", None):
        # Its last layers may be of a kind that its first are not.
        chosen = kinds[:layers]
        chosen[-1] = next((kind for kind in kinds if kind not in chosen), chosen[-1])
        config.layer_types = chosen
    if getattr(config, "sliding_window", None):
        config.sliding_window = WINDOW

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        twin = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
        for parameter in twin.parameters():
            parameter.data = torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.2)
            if parameter.dim() == 1:
                parameter.data += 1
    twin.set_attn_implementation("sdpa")  # a backbone's network has our own
    return twin.eval()


def gains_one_more(twin: Any) -> bool:
    """Returns True if a network's norms multiply by 1 + w; raises Unsupported unless they are RMS norms."""
    norm = Layers(twin).base.norm
    x = torch.linspace(-2, 3, 2 * len(norm.weight)).view(2, -1)
    unit = F.rms_norm(x, x.shape[-1:], eps=eps_of(norm))
    for one_more in (False, True):
        if torch.allclose(norm(x), unit * (norm.weight + one_more), atol=1e-4, rtol=1e-4):
            return one_more
    raise Unsupported(f"{type(norm).__name__} computes something other than an RMS norm")


@torch.inference_mode()
def _compare(twin: Any, one_more: bool) -> None:
    """Raises Unsupported unless the library gives a twin's states and logits, at its first and last positions."""
    description = dataclasses.replace(describe(twin), one_more=one_more)
    packed = pack_in_memory(description, NetworkWeights(twin), None, False)
    backbone = Backbone(twin)
    engine = NativeEngine(backbone, NativeModel(description, packed, rotary_of(twin)), False)
    tokens = probe_tokens(backbone.vocab_size, TOKENS)

    # A twin's window is short; its context is the model's.
    for first in (0, max(0, usable_positions(twin.config) - TOKENS)):
        positions = first + torch.arange(TOKENS)[None]
        expected = padded_pass(backbone, tokens[None], position_ids=positions).last_hidden_state[0]
        states = engine.states_at(tokens, first)
        error = float((states - expected).norm() / expected.norm())
        if not error <= TOLERANCE:
            raise Unsupported(
                f"its states differ from the network's own by {error:.2%} from position {first:,} on"
            )

    expected_logits = twin.get_output_embeddings()(expected)
    logits = engine.logits_of(expected)
    if not torch.allclose(expected_logits, logits, atol=1e-4 * float(expected_logits.abs().max())):
        raise Unsupported("its logits are not its lm_head's own")
