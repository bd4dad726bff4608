"""MTP: the multi-token prediction layer that comes with a model, run with transformers' decoder layer class."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.device import upload
from medusa_cli.drafters.base import Batch
from medusa_cli.drafters.eagle import LayerDrafter
from medusa_cli.drafters.heads import HeadDrafter, HeadsConfig
from medusa_cli.drafters.layer_rows import LayerRows, whole_mask
from medusa_cli.drafters.layers import Padding, last_of
from medusa_cli.engine.native_layer import ROWS_AT_ONCE, pieces
from medusa_cli.errors import UserError, first_line, shown
from medusa_cli.files.gguf_names import GgufNames
from medusa_cli.files.io import convert
from medusa_cli.files.model_source import ModelSource
from medusa_cli.files.mtp_layer import NAME, Layout, mtp_settings, need_layout
from medusa_cli.files.safetensors_files import opened
from medusa_cli.model import Backbone
from medusa_cli.model.backbone import text_model
from medusa_cli.model.grouped_attention import cache_name
from medusa_cli.model.masks import additive
from medusa_cli.model.weights import GgufWeights

# Model types that transformers does not support, mapped to types with the same layers.
ALIKE = {"mimo": "qwen2"}
# Fields of a model's config that are set differently for the few layers of a drafter.
GIVEN = ("model_type", "layer_types", "num_hidden_layers")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class MtpConfig(HeadsConfig):
    """Adds MTP's settings.

    num_heads: the number of draft tokens on a path; the single layer runs once for each. text: the
    model's config for one layer, in transformers' form. state_first: True if the projection reads
    [state; embedding]. raw_state: True if the layer reads the state before the model's final norm.
    """

    text: dict[str, Any] = field(default_factory=dict)
    state_first: bool = False
    raw_state: bool = False


class MtpLayer(nn.Module):
    """Runs a decoder layer over the projected [embedding; state], both normalized, and normalizes its output."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        parts = LayerParts.of(config.text, 1)
        norm = parts.norm
        eps = parts.config.rms_norm_eps
        size = config.hidden_size
        self.state_first = config.state_first
        self.embedding_norm = norm(size, eps=eps)
        self.state_norm = norm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layer = parts.layer(parts.config, 0)
        self.norm = norm(size, eps=eps)
        # In a tuple, rotary embeddings are no submodule, so changes of dtype leave their rates in fp32.
        with torch.device("cpu"):
            self._rotary = (parts.rotary(parts.config),)
        self._cache = cache_name(type(self.layer).forward)

    def forward(
        self, states: Tensor, embedded: Tensor, positions: Tensor, mask: Tensor, rows: Any
    ) -> Tensor:
        """Returns the normalized output [N, H] for rows with states and embeddings [N, H] at positions [N].

        mask [N, M] bool: which of the earlier and current rows each row sees. rows: stores the keys
        and values of the current rows, and returns those of all rows.
        """
        dtype = self.norm.weight.dtype
        parts = [self.embedding_norm(embedded.to(dtype)), self.state_norm(states.to(dtype))]
        x = self.fc(torch.cat(parts[::-1] if self.state_first else parts, dim=-1))[None]
        out = self.layer(
            x,
            attention_mask=additive(mask, x.dtype)[None, None],
            position_embeddings=self._rotary[0](x, positions[None]),
            position_ids=positions[None],
            **{self._cache: rows},
        )
        normed: Tensor = self.norm(out[0] if isinstance(out, tuple) else out)[0]
        return normed


class CachedRows:
    """Provides a layer with the rows of B sequences, one after another, and stores new rows in the caches."""

    def __init__(self, caches: Sequence[LayerRows], positions: Sequence[Sequence[int]]) -> None:
        self._caches = caches
        self._positions = positions

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds keys and values [1, heads, N, D]; returns those of all rows [1, heads, M, D]."""
        counts = [len(own) for own in self._positions]
        width = values.shape[-1]
        wide = F.pad(values, (0, keys.shape[-1] - width))  # MLA's values are narrower than its keys
        parts = zip(
            self._caches,
            keys[0].split(counts, 1),
            wide[0].split(counts, 1),
            self._positions,
            strict=True,
        )
        known = [
            cache.append(own_keys, own_values, at) for cache, own_keys, own_values, at in parts
        ]
        every = [torch.cat(rows, dim=1)[None] for rows in zip(*known, strict=True)]
        return every[0], every[1][..., :width]


class GrowingRows:
    """Keeps the rows of earlier steps for later steps, with their gradients."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor, Tensor]] = []

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds keys and values [1, heads, N, D]; returns those of all rows."""
        self._known.append((keys, values))
        every = [torch.cat(rows, dim=2) for rows in zip(*self._known, strict=True)]
        return every[0], every[1]


class TransformersDrafter(HeadDrafter):
    """Runs layers from transformers, which need a single dtype throughout."""

    def packed(self, name: str) -> Any:
        fresh = name not in self._packed
        module = super().packed(name)
        if fresh and name in self._packed:
            module.float()  # packed layers return fp32
        return module


class Mtp(TransformersDrafter, LayerDrafter):
    """Runs a model's MTP layer over the model's final states; a step's normalized output is the next step's state.

    The layer also reads the model's embeddings. The model's lm_head scores all tokens or a draft vocabulary.
    """

    name = NAME
    learning_rate = 1e-4  # the layer is already trained
    regress = 0.0
    config_class = MtpConfig
    settings = ()
    vocabularies = ("draft", "shared")
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        self.mtp = MtpLayer(config)
        self.truncate(0)

    @classmethod
    def create(cls, backbone: Backbone, *settings: Any, **named: Any) -> Mtp:
        """Returns the drafter in fp32 with the weights from the model's checkpoint."""
        drafter = super().create(backbone, *settings, **named)
        assert isinstance(drafter, Mtp)
        tensors = checkpoint_tensors(ModelSource.of(backbone.id))
        with torch.no_grad():
            for name, weight in drafter.named_weights().items():
                weight.copy_(tensors[name])
        return drafter

    @classmethod
    def fields_of_model(cls, backbone: Backbone, num_heads: int) -> dict[str, Any]:
        settings = mtp_settings(ModelSource.of(backbone.id))
        return {"num_layers": 1, "text": settings["text"], "state_first": settings["state_first"]}

    @property
    def decoder_layers(self) -> list[Any]:
        return [self.mtp]

    def named_weights(self) -> dict[str, Tensor]:
        """Returns every weight under its name in the file, including the biases of expert routers."""
        return self.state_dict(keep_vars=True)

    @classmethod
    def weights_elsewhere(cls, folder: Path, model: str | None) -> dict[str, Tensor] | None:
        if (folder / cls.weights_file).is_file() or model is None:
            return None
        return checkpoint_tensors(ModelSource.of(model))

    def enter(self, backbone: Backbone, hidden: Tensor) -> Tensor:
        states = hidden.to(self.dtype)
        gain = backbone.engine.final_gain() if self.config.raw_state else None
        # Without its gain, the final norm only scales a state, and the MTP layer's norm cancels the scale.
        return states if gain is None else states / gain.to(states)

    def extend(
        self,
        states: Tensor,
        positions: Sequence[Sequence[int]],
        caches: Sequence[LayerRows],
        embedded: Tensor,
        *,
        masks: Sequence[Tensor] | None = None,
        last: bool = False,
    ) -> Tensor:
        counts = [len(own) for own in positions]
        if masks is None and sum(counts) > ROWS_AT_ONCE:
            last_rows = {
                i: self.extend(states[rows], [piece], [caches[i]], embedded[rows], last=True)
                for i, rows, piece in pieces(positions)
            }
            return torch.cat(list(last_rows.values()))
        device = states.device
        if masks is None:
            masks = [
                torch.ones(count, count, dtype=torch.bool, device=device).tril() for count in counts
            ]
        before = [cache.length + count for cache, count in zip(caches, counts, strict=True)]
        mask = torch.block_diag(*map(whole_mask, masks, before)).bool()
        flat = upload([position for own in positions for position in own], device)
        layer: MtpLayer = self.packed("mtp")
        out = layer(states, embedded, flat, mask, CachedRows(caches, positions))
        return out[upload(last_of(counts), device)] if last else out

    def head_states(self, backbone: Backbone, batch: Batch) -> Iterator[Tensor]:
        """Yields the states of each step in the training-time test; see `eagle.training_time_test`."""
        padding = Padding(batch.attention_groups, batch.hidden.device)
        learned = batch.learned
        count = len(learned)
        embedded = self.embed(backbone, batch.next)
        every = torch.arange(len(batch.next), device=learned.device)
        mask = (padding.sequence[:, None] == padding.sequence) & (every[:, None] >= every)
        known = GrowingRows()
        entering = self.enter(backbone, batch.hidden)
        states = self.mtp(entering, embedded, padding.position, mask, known)[learned]
        mask = mask[learned]
        itself = torch.eye(count, dtype=torch.bool, device=learned.device)
        for step, tokens in enumerate(batch.ahead(self.num_heads - 1)):
            if step:
                mask = torch.cat([mask, itself], dim=1)
                at = padding.position[learned] + step
                states = self.mtp(states, embedded[tokens], at, mask, known)
            yield states.to(batch.hidden.dtype)


def as_ported(drafter: Mtp, batch: Batch) -> dict[str, tuple[Mtp, Batch]]:
    """Returns the drafter and the batch for alternative readings of the checkpoint, keyed by the change.

    Each reading contains a single error that ports of MTP layers have made.
    """
    raw = "after" if drafter.config.raw_state else "before"
    other_state, other_order, other_norms = (_copy(drafter) for _ in range(3))
    other_state.config = replace(drafter.config, raw_state=not drafter.config.raw_state)
    other_order.mtp.state_first = not drafter.mtp.state_first
    norm: Any = type(drafter.mtp.norm)
    adds_one = not norm(1).weight.any()
    for module in other_norms.mtp.modules():
        if type(module) is norm:
            weight: Any = module.weight
            weight.add_(-1.0 if adds_one else 1.0)
    at_itself = torch.cat([batch.next[:1], batch.next[:-1]])
    first = "embedding" if drafter.mtp.state_first else "state"
    return {
        f"the state {raw} the model's last norm": (other_state, batch),
        f"norms' weights stored as {'w' if adds_one else '1 + w'}": (other_norms, batch),
        f"the {first} first in the projection": (other_order, batch),
        "each state with its own token, not the next": (drafter, replace(batch, next=at_itself)),
    }


def _copy(drafter: Mtp) -> Mtp:
    """Returns a copy of a drafter with its own weights."""
    other = Mtp(drafter.config)
    other.load_state_dict(drafter.state_dict())
    other.draft_ids.copy_(drafter.draft_ids)
    device = drafter.draft_ids.device
    return other.to(device, drafter.dtype).eval().requires_grad_(False)


@dataclass(frozen=True)
class LayerParts:
    """Holds transformers' config for a model with a few layers, and the classes of the model's parts."""

    config: Any
    layer: Any
    norm: Any
    rotary: Any

    @classmethod
    def of(cls, fields: dict[str, Any], layers: int) -> LayerParts:
        """Returns the parts for layers with full attention, given the fields of a model's config.

        Raises UserError for a model type that transformers does not support, and for impossible values.
        """
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        kind = str(fields.get("model_type"))
        own = {key: value for key, value in fields.items() if key not in GIVEN}
        with refusing(kind):
            config = CONFIG_MAPPING[ALIKE.get(kind, kind)](**own, num_hidden_layers=layers)
            if getattr(config, "layer_types", None):
                config.layer_types = ["full_attention"] * layers
            config._attn_implementation = "sdpa"
            config._experts_implementation = "eager"
            with torch.device("meta"):
                base = text_model(AutoModelForCausalLM.from_config(config))
            parts = cls(config, type(base.layers[0]), type(base.norm), type(base.rotary_emb))
            if not hasattr(config, "rms_norm_eps"):
                raise ValueError("its norms are no RMS norms")
        return parts


@contextmanager
def refusing(kind: str) -> Iterator[None]:
    """Converts errors from transformers' configs and layers, which have many types, to a UserError."""
    try:
        yield
    except Exception as reason:
        raise UserError(
            f"transformers cannot run the drafter's layers, of the model type {shown(kind)}: "
            f"{first_line(reason)}",
            "use another @drafter",
        ) from reason


def checkpoint_tensors(model: ModelSource) -> dict[str, Tensor]:
    """Returns the tensors of a model's MTP layer under our names.

    Raises UserError if the model's checkpoint holds no such layer, or a quantized one.
    """
    layout = need_layout(model)
    if model.weights_in_gguf:
        return gguf_tensors(model, layout)
    tensors: dict[str, Tensor] = {}
    with opened(model.checkpoint, "pt", model.index) as slices:
        for name, part in slices.items():
            own = layout.ours(name)
            if own is not None:
                tensors[own] = part[...]
                if tensors[own].dtype not in FLOATS:
                    fault = f"the MTP layer of {model.name} is quantized ({name} is of {tensors[own].dtype})"
                    raise UserError(fault, "use a checkpoint in bf16, or another @drafter")
    return with_joined_experts(tensors)


def gguf_tensors(model: ModelSource, layout: Layout) -> dict[str, Tensor]:
    """Returns the tensors of the MTP layer in a model's GGUF file in fp32, under our names.

    Raises UserError if the file lacks a part of the layer, or has one that the layer does not use.
    """
    from transformers import AutoConfig

    settings = convert(mtp_settings(model), MtpConfig, "the MTP layer's config")
    with torch.device("meta"):
        weights = MtpLayer(settings).state_dict()
    own = {layout.theirs(name): weight for name, weight in weights.items()}
    ours = dict(zip(own, weights, strict=True))
    config = AutoConfig.from_pretrained(model.folder).get_text_config()
    layer = config.num_hidden_layers
    config.num_hidden_layers += 1
    try:
        names = GgufNames(model.header, own, config, within=f"blk.{layer}.")
    except ValueError as reason:
        fault = (
            f"@drafter {NAME}: the MTP layer of {model.name} cannot be used: {first_line(reason)}"
        )
        raise UserError(fault, "get the file again, or use another @drafter") from reason
    return {f"{NAME}.{ours[name]}": values for name, values in GgufWeights(model, names).items()}


def with_joined_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a layer's tensors, with the experts' tensors joined as in transformers' layers.

    gate and up [I, H] become gate_up_proj [E, 2 I, H], and down [H, I] becomes down_proj [E, H, I].
    """
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    joined: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if part := EXPERT.fullmatch(name):
            place, number, matrix = part.groups()
            experts.setdefault(place, {}).setdefault(int(number), {})[matrix] = tensor
        else:
            joined[name] = tensor
    for place, parts in experts.items():
        every = [parts[number] for number in sorted(parts)]
        if any(len(part) < 3 for part in every):
            continue  # missing tensors are reported by the later check
        gate_up = [torch.cat([part["gate_proj"], part["up_proj"]]) for part in every]
        joined[f"{place}.gate_up_proj"] = torch.stack(gate_up)
        joined[f"{place}.down_proj"] = torch.stack([part["down_proj"] for part in every])
    return joined
