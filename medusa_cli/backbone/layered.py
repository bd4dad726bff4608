"""A transformers decoder's own layers run one by one, so that rows can join a pass on the way."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from medusa_cli.backbone.pseudo import Riders


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


class LayeredDecoder:
    """Runs the network's layers in turn as the network would; what the fast engine is for pseudo rows elsewhere."""

    def __init__(self, model: Any) -> None:
        self._parts = Layers(model)

    def __call__(
        self,
        tokens: Tensor,
        cache: Any,
        mask: Tensor | dict[str, Tensor],
        positions: Tensor,
        taps: Sequence[int],
        riders: Riders | None = None,
    ) -> Tensor:
        """States [B, n, H] after the last norm of tokens [B, n]; positions and masks are those of the riders too."""
        parts = self._parts
        x = parts.base.embed_tokens(tokens)
        kinds = sorted(set(parts.kinds))
        masks = mask if isinstance(mask, dict) else dict.fromkeys(kinds, mask)
        tables = {kind: parts.rotary(x, positions, kind) for kind in kinds}
        for index, (layer, kind) in enumerate(zip(parts.layers, parts.kinds, strict=True)):
            if riders is not None:
                x = riders.enter(index, x)
            rows = x.shape[1]
            cos, sin = tables[kind]
            x = layer(
                x,
                attention_mask=cut(masks[kind], rows),
                position_embeddings=(cos[:, :rows], sin[:, :rows]),
                position_ids=positions[:, :rows],
                past_key_values=cache,
                use_cache=True,
            )
        return parts.base.norm(x)


def cut(mask: Tensor, rows: int) -> Tensor:
    """A mask [B, 1, n, L] for its first rows and without the columns of those that have not entered yet."""
    late = mask.shape[2] - rows
    return mask[:, :, :rows, : mask.shape[3] - late] if late else mask
