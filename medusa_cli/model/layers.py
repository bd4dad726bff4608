"""The parts of a transformers decoder, found by the names that most architectures give them."""

from typing import Any

from torch import Tensor, nn

from medusa_cli.errors import UserError


class Unsupported(Exception):
    """Why an engine cannot run a model."""


class Layers:
    """The parts most decoders are made of: embedding, rotary tables, layers, the last norm; else Unsupported."""

    def __init__(self, model: Any) -> None:
        base, config = model.base_model, model.config.get_text_config()
        if not all(hasattr(base, name) for name in ("layers", "norm", "rotary_emb", "embed_tokens")):
            raise Unsupported("its parts are not named as in Llama")
        self.base = base
        self.layers = base.layers
        self.kinds: list[str] = getattr(config, "layer_types", None) or ["full_attention"] * len(base.layers)
        self._by_kind = getattr(base.rotary_emb, "layer_types", None) is not None

    def rotary(self, x: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, n, D] of positions [B, n] in layers of a kind, of x's type."""
        rotary = self.base.rotary_emb
        cos, sin = rotary(x, positions, kind) if self._by_kind else rotary(x, positions)
        return cos, sin


def decoder_layers(network: Any, setting: str) -> list[nn.Module]:
    """The decoder layers of any network; UserError, naming the setting that needs them, where it has no list."""
    depth = network.config.get_text_config().num_hidden_layers
    for module in network.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return list(module)
    kind = network.config.model_type
    raise UserError(f"{setting}: the model type {kind!r} has no list of layers", "leave it out")
