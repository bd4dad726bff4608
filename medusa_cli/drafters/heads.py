"""The base class of drafters that have K heads with vocabulary matrices: config, creation and training states."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.drafters.base import Batch, NewTokens
from medusa_cli.drafters.layer_rows import LayerRows
from medusa_cli.drafters.layers import DecoderLayer, TokenBias
from medusa_cli.drafters.scoring import Scoring
from medusa_cli.drafters.slots import NewTensors
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.tree.tensors import TreeTensors

if TYPE_CHECKING:
    from typing import Self

# The number of a prompt's last tokens that decoder layers read. With the default model's drafter,
# reading more tokens did not raise acceptance for prompts of 3,000 and 7,800 tokens. Drafters of
# other makers were not measured.
PROMPT_TOKENS = 512


def check_ranges(config: Any, **ranges: tuple[int, float]) -> None:
    """Raises ValueError, naming the field, if a number is outside its range; a field may also be None."""
    for name, (least, most) in ranges.items():
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            limits = f">= {least}" if most == math.inf else f"{least} to {most}"
            raise ValueError(f"{name} must be {limits}, not {value}")


@dataclass(frozen=True)
class HeadsConfig:
    """Holds the numbers of heads K and layers L, and the vocabulary that the heads score.

    vocabulary "own": all V tokens; "draft": the M most frequent tokens; "shared": all tokens, scored by the backbone's
    lm_head. matrices: a vocabulary matrix for "each" head, "one" for all, or "none", which uses rows of the lm_head and
    does not train them. conditional: the rank of the bias from the previous token.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    vocabulary: Literal["draft", "own", "shared"] = "draft"
    draft_vocab_size: int | None = None
    matrices: Literal["each", "one", "none"] = "each"
    conditional: int | None = None

    def __post_init__(self) -> None:
        check_ranges(self, num_heads=(1, 64), num_layers=(0, 16), conditional=(1, math.inf))
        check_ranges(
            self,
            hidden_size=(1, math.inf),
            vocab_size=(1, math.inf),
            draft_vocab_size=(1, math.inf),
        )
        if (self.draft_vocab_size or 0) > self.vocab_size:
            raise ValueError("draft_vocab_size must be <= vocab_size")
        if self.vocabulary == "draft" and self.draft_vocab_size is None:
            raise ValueError("a draft vocabulary needs its draft_vocab_size")


class HeadDrafter(Scoring):
    """Has K heads that end in vocabulary matrices [M, H]: one per head, one for all heads, or the backbone's lm_head.

    A subclass defines how the states are computed (`head_states`) and how a tree is drafted from them (`draft`).
    """

    name: ClassVar[str]
    learning_rate: ClassVar[float] = 2e-3  # the peak learning rate, unless a recipe sets it
    # Default of train.regress in stage 1; None if the heads do not read earlier draft tokens.
    regress: ClassVar[float | None] = None
    soft: ClassVar[float | None] = None  # a fixed share of soft targets; None uses train.soft
    weights_file: ClassVar[str] = "drafter.safetensors"
    config_class: ClassVar[type[HeadsConfig]] = HeadsConfig
    # Of the drafter keys of a recipe that only some kinds read, those that this kind reads.
    settings: ClassVar[tuple[str, ...]] = ("num_layers", "matrices")
    # The supported vocabularies. A kind without "own" has no vocabulary matrices.
    vocabularies: ClassVar[tuple[str, ...]] = ("draft", "own", "shared")
    reads_next: ClassVar[bool] = False  # rows of its decoder layers also read the next token
    drafts_in_graphs: ClassVar[bool] = False  # `fill` drafts within a CUDA graph
    sees_prompt: bool = False  # its decoder layers see a conversation from the start
    config: HeadsConfig
    caches: list[LayerRows]  # the rows of the drafter's sequence, per decoder layer

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_heads
        is_draft = config.vocabulary == "draft"
        size = (config.draft_vocab_size or 0) if is_draft else config.vocab_size
        ids = torch.zeros(size, dtype=torch.long)
        # On the meta device, torch.arange imports sympy.
        if not is_draft and not ids.is_meta:
            ids = torch.arange(size)
        self.register_buffer("draft_ids", ids, persistent=False)
        learned = config.vocabulary != "shared" and "own" in self.vocabularies
        count = 0
        if learned:
            count = {"each": config.num_heads, "one": 1, "none": 0}[config.matrices]
        shape = (len(ids), config.hidden_size)
        self.matrices = nn.ParameterList(nn.Parameter(torch.empty(shape)) for _ in range(count))
        rank = config.conditional
        self.conditional = TokenBias(config.vocab_size, len(ids), rank) if rank else None
        self._forget_packed()

    @classmethod
    def create(
        cls,
        backbone: Backbone,
        num_heads: int = 5,
        num_layers: int = 1,
        vocabulary: str = "draft",
        draft_ids: Tensor | None = None,
        matrices: str = "each",
        **own: Any,
    ) -> Self:
        """Returns a fresh fp32 drafter with matrices copied from the lm_head.

        draft_ids [M]: for the vocabulary "draft". own: config fields that only this kind has; None and () select values
        that follow from the model. Raises UsageError for an unsupported vocabulary.
        """
        if vocabulary not in cls.vocabularies:
            fault = f"drafter.vocabulary={vocabulary} is not a vocabulary of {cls.name}"
            raise UsageError(fault, f"use one of {', '.join(cls.vocabularies)}")
        ids = None if vocabulary != "draft" or draft_ids is None else draft_ids.sort().values
        fields = {"num_layers": num_layers, "matrices": matrices} | cls.fields_of_model(
            backbone, num_heads
        )
        fields |= {key: value for key, value in own.items() if value not in (None, ())}
        sizes = {
            "hidden_size": backbone.hidden_size,
            "vocab_size": backbone.vocab_size,
            "num_heads": num_heads,
        }
        size = None if ids is None else len(ids)
        config = cls.config_class(vocabulary=vocabulary, draft_vocab_size=size, **sizes, **fields)  # type: ignore[arg-type]
        cls.check_fit(config, backbone)
        drafter = cls(config)
        if ids is not None:
            drafter.draft_ids.copy_(ids)
        rows = drafter.of_vocabulary(backbone.lm_head_weight)
        for matrix in drafter.matrices:
            matrix.data.copy_(rows)
        return drafter.to(backbone.device)

    @classmethod
    def fields_of_model(cls, backbone: Backbone, num_heads: int) -> dict[str, Any]:
        """Returns the fields of a fresh config that follow from the model."""
        return {}

    @classmethod
    def check_fit(cls, config: Any, backbone: Backbone) -> None:
        """Raises UsageError if a config asks for layers that the backbone does not have."""

    @property
    def prompt_tokens(self) -> int:  # type: ignore[override]
        return PROMPT_TOKENS if self.sees_prompt else 1

    @property
    def reads_every_step(self) -> bool:
        return bool(self.caches)

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """Returns the layers that `caches` belong to, in order."""
        return [module for module in self.modules() if isinstance(module, DecoderLayer)]

    def read(self, backbone: Backbone, sequences: Sequence[Self], new: Sequence[NewTokens]) -> Any:
        """Adds new tokens to the caches of B sequences; returns the states from which the drafter drafts."""

    def fill(self, backbone: Backbone, new: NewTensors, trees: TreeTensors) -> None:
        """Drafts the tree nodes whose tokens are not known yet, within a CUDA graph."""
        raise NotImplementedError(f"{self.name} does not draft within CUDA graphs")

    def truncate(self, length: int) -> int:
        if not length or not self.sees_prompt:  # forks do not share caches
            self.caches = [LayerRows() for _ in self.decoder_layers]
            return length
        # If rows also read the next token, the last row is dropped, since its next token may differ now.
        end = min(cache.truncate(length - self.reads_next) for cache in self.caches)
        for cache in self.caches:  # caches may end at different positions
            cache.truncate(end)
        return end

    # Training

    @torch.no_grad()
    def start_from(self, trained: HeadDrafter) -> None:
        """Copies the weights and the vocabulary of a trained drafter of the same kind.

        The trained drafter may have fewer layers.
        """
        weights = dict(trained.named_parameters())
        for name, weight in self.named_parameters():
            if name in weights:
                weight.copy_(weights[name])
        self.draft_ids.copy_(trained.draft_ids)

    @abstractmethod
    def head_states(self, backbone: Backbone, batch: Batch) -> Iterator[Tensor]:
        """Yields the states [n, H] of each head in turn at the n trained positions of a batch.

        Each head reads the true tokens before its target.
        """

    @torch.inference_mode()
    def logits(self, backbone: Backbone, batch: Batch) -> Iterator[Tensor]:
        """Yields each head's fp32 logits [n, M] at the n trained positions, given the true tokens before them."""
        batch = replace(batch, hidden=batch.hidden.to(self.dtype))
        before = batch.next[batch.ahead(self.num_heads)]
        bias = self.bias(backbone)
        bias = None if bias is None else bias.to(self.dtype)
        for head, states in enumerate(self.head_states(backbone, batch)):
            read, matrix = self.factors(backbone, head, states, before[head])
            yield F.linear(read, matrix.to(read.dtype), bias).float()

    # Files

    def for_files(self) -> Self:
        """Returns the drafter whose weights are written to files, by default this drafter."""
        return self

    def named_weights(self) -> dict[str, Tensor]:
        """Returns every weight under its name in the file.

        The tensors are the parameters themselves.
        """
        return dict(self.named_parameters())

    @classmethod
    def weights_elsewhere(cls, folder: Path, model: str | None) -> dict[str, Tensor] | None:
        """Returns the weights for a folder that holds only a config, or None if the folder holds weights.

        model: the base model named in the config.
        """
        return None

    def config_json(self) -> dict[str, Any]:
        """Returns the config in the form of config.json."""
        return asdict(self.config)

    @classmethod
    def read_config(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Returns the config's fields from the output of `config_json`."""
        return data
