"""Drafters of K heads that end in vocabulary matrices: scores, states for training, and filling trees."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from msgspec import Meta
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.drafters.base import Batch, Drafter, NewTokens
from medusa_cli.drafters.layers import DecoderLayer, LayerCache, TokenBias, owners
from medusa_cli.drafters.levels import Frontier, Guess
from medusa_cli.engine.linear import pack_linears, packed_linear, packs
from medusa_cli.errors import UsageError
from medusa_cli.files.io import write_json
from medusa_cli.model import Backbone

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class HeadsConfig:
    """K heads of L layers, and the vocabulary they score.

    vocabulary "own": all V tokens; "draft": the M most frequent ones; "shared": all, by the backbone's lm_head.
    matrices: a vocabulary matrix for "each" head or "one" for all. conditional: rank of the bias from the token before.
    """

    num_heads: Annotated[int, Meta(ge=1, le=64)]
    num_layers: Annotated[int, Meta(ge=0, le=16)]
    hidden_size: Annotated[int, Meta(ge=1)]
    vocab_size: Annotated[int, Meta(ge=1)]
    vocabulary: Literal["draft", "own", "shared"] = "draft"
    draft_vocab_size: Annotated[int, Meta(ge=1)] | None = None
    matrices: Literal["each", "one"] = "each"
    conditional: Annotated[int, Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        if (self.draft_vocab_size or 0) > self.vocab_size:
            raise ValueError("draft_vocab_size must be <= vocab_size")
        if self.vocabulary == "draft" and self.draft_vocab_size is None:
            raise ValueError("a draft vocabulary needs its draft_vocab_size")


class HeadDrafter(Drafter):
    """K heads that end in vocabulary matrices [M, H]: one each, one for all, or the backbone's lm_head.

    A subclass says how the states are made (`head_states`) and how a tree is drafted from them (`draft`).
    """

    name: ClassVar[str]
    learning_rate: ClassVar[float] = 2e-3  # the peak where a recipe names none
    # Default of train.regress in stage 1; None: its heads do not read the tokens drafted before theirs.
    regress: ClassVar[float | None] = None
    soft: ClassVar[float | None] = None  # fixes the share of soft targets; None: train.soft
    weights_file: ClassVar[str] = "drafter.safetensors"
    config_class: ClassVar[type[HeadsConfig]] = HeadsConfig
    settings: ClassVar[tuple[str, ...]] = ("num_layers", "matrices")  # the drafter keys of a recipe that not all read
    vocabularies: ClassVar[tuple[str, ...]] = ("draft", "own", "shared")  # without "own" it has no matrices
    reads_next: ClassVar[bool] = False  # the rows of its own decoder layers also see the token after theirs
    sees_prompt: bool = False  # its own decoder layers see a conversation from its first token
    config: HeadsConfig
    caches: list[LayerCache]  # what its decoder layers have read of its sequence
    draft_ids: Tensor  # [M], token ids of the scores
    _lm_head_rows: Tensor | None  # of a draft vocabulary, where it has no matrices

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_heads
        ids = torch.arange(config.vocab_size)
        if config.vocabulary == "draft":
            ids = torch.zeros(config.draft_vocab_size or 0, dtype=torch.long)
        self.register_buffer("draft_ids", ids, persistent=False)
        learnt = config.vocabulary != "shared" and "own" in self.vocabularies
        count = (1 if config.matrices == "one" else config.num_heads) if learnt else 0
        self.matrices = nn.ParameterList(nn.Parameter(torch.empty(len(ids), config.hidden_size)) for _ in range(count))
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
    ) -> "Self":
        """Returns a fresh fp32 drafter, its matrices copied from the lm_head; draft_ids [M] for "draft".

        own: fields of the config that this kind alone has; those that are None or () follow from the model.
        """
        if vocabulary not in cls.vocabularies:
            raise UsageError(
                f"drafter.vocabulary={vocabulary} is none that {cls.name} can score",
                f"use one of {', '.join(cls.vocabularies)}",
            )
        ids = None if vocabulary != "draft" or draft_ids is None else draft_ids.sort().values
        fields = {"num_layers": num_layers, "matrices": matrices} | cls.fields_of_model(backbone, num_heads)
        fields |= {key: value for key, value in own.items() if value not in (None, ())}
        sizes = {"hidden_size": backbone.hidden_size, "vocab_size": backbone.vocab_size, "num_heads": num_heads}
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
        """Returns fields of a fresh config that follow from the model."""
        return {}

    @classmethod
    def check_fit(cls, config: Any, backbone: Backbone) -> None:
        """Raises UsageError where a config asks for layers that the backbone does not have."""

    def first_input(self, prompt: NewTokens) -> NewTokens:
        """Returns all new prompt tokens if its own layers see the prompt, else the last one."""
        return prompt if self.sees_prompt else prompt.last()

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """Returns the layers that `caches` belong to, in order."""
        return [module for module in self.modules() if isinstance(module, DecoderLayer)]

    def read(self, backbone: Backbone, sequences: "Sequence[Self]", new: Sequence[NewTokens]) -> Any:
        """Adds new tokens to the caches of B sequences; returns the states from which it drafts."""

    def truncate(self, length: int) -> int:
        if not length or not self.sees_prompt:  # every fork has caches of its own, and every prompt another answer
            self.caches = [LayerCache() for _ in self.decoder_layers]
            return length
        # A last row that saw which token follows goes: it may be another now.
        end = min(cache.truncate(length - self.reads_next) for cache in self.caches)
        for cache in self.caches:  # they may end at different positions
            cache.truncate(end)
        return end

    # Training

    @torch.no_grad()
    def start_from(self, trained: "HeadDrafter") -> None:
        """Copies the weights and the vocabulary of a trained drafter of the same kind, which may have fewer layers."""
        weights = dict(trained.named_parameters())
        for name, weight in self.named_parameters():
            if name in weights:
                weight.copy_(weights[name])
        self.draft_ids.copy_(trained.draft_ids)

    @abstractmethod
    def head_states(self, backbone: Backbone, batch: Batch, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yields the states [n, H] of each head in turn at its rows [n] of the batch, for as many heads as `rows` has.

        Each head reads the true tokens before its target.
        """

    def matrix(self, backbone: Backbone, head: int) -> Tensor:
        """Returns the vocabulary matrix [M, H] of a head (from 0)."""
        if len(self.matrices):
            return self.matrices[head if len(self.matrices) > 1 else 0]
        if self._lm_head_rows is None:
            self._lm_head_rows = self.of_vocabulary(backbone.lm_head_weight)
        return self._lm_head_rows

    def bias(self, backbone: Backbone) -> Tensor | None:
        """Returns the bias [M] of the lm_head for heads without matrices of their own; None if there is none."""
        return None if len(self.matrices) else self.of_vocabulary(backbone.lm_head_bias)

    def of_vocabulary(self, rows: Any) -> Any:
        """Selects from rows [V, ..] of the model's tokens those that the heads score [M, ..]; None stays None."""
        whole = rows is None or self.config.vocabulary != "draft"
        return rows if whole else rows[self.draft_ids.to(rows.device)]

    def vocabulary_index(self, device: torch.device) -> Tensor:
        """Returns token id -> row of the vocabulary matrices [V], -1 for tokens outside the draft vocabulary."""
        index = torch.full((self.config.vocab_size,), -1, dtype=torch.long, device=device)
        index[self.draft_ids.to(device)] = torch.arange(len(self.draft_ids), device=device)
        return index

    def product(self, backbone: Backbone, head: int, states: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the factors [n, ..] and [M, ..] of a head's scores, from states [n, H] and the tokens before [n]."""
        matrix = self.matrix(backbone, head)
        return (states, matrix) if self.conditional is None else self.conditional.product(states, matrix, before)

    @torch.inference_mode()
    def logits(self, backbone: Backbone, batch: Batch) -> Iterator[Tensor]:
        """Yields each head's fp32 logits [n, M] at the n positions that are learnt, given the true tokens before."""
        batch = replace(batch, hidden=batch.hidden.to(self.dtype))
        rows, last, bias = batch.learnt, len(batch.next) - 1, self.bias(backbone)
        bias = None if bias is None else bias.to(self.dtype)
        for head, states in enumerate(self.head_states(backbone, batch, [rows] * self.num_heads)):
            read, matrix = self.product(backbone, head, states, batch.next[(rows + head).clamp(max=last)])
            yield F.linear(read, matrix.to(read.dtype), bias).float()

    # Drafting

    def train(self, mode: bool = True) -> "Self":
        self._forget_packed()
        super().train(mode)
        return self

    def _forget_packed(self) -> None:
        """Drops what was made of the weights for drafting: they may change now."""
        self._packed: dict[str, nn.Module] = {}
        self._scorers: list[Callable[[Tensor], Tensor]] = []
        self._lm_head_rows = None

    def packed(self, name: str) -> Any:
        """Returns the submodule `name` with its linear layers packed for drafting: a copy where they are packed."""
        if not packs(next(self.parameters()).device):
            return getattr(self, name)
        if name not in self._packed:
            self._packed[name] = copy.deepcopy(getattr(self, name))
            pack_linears(self._packed[name])
        return self._packed[name]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def embed(self, backbone: Backbone, tokens: Tensor) -> Tensor:
        """Returns the backbone's embeddings [.., H] at unit root mean square: raw ones are far smaller than states."""
        embedded = backbone.embedding(tokens).to(self.dtype)
        return F.rms_norm(embedded, embedded.shape[-1:])

    def score(self, backbone: Backbone, head: int, states: Tensor) -> Tensor:
        """Returns logits fp32 [.., M] of a head for states [.., H]: top-k over bf16 is several times slower."""
        engine, own = backbone.engine, len(self.matrices) > 0
        if not self._scorers:  # forks share this very list
            if own:
                self._scorers += [packed_linear(matrix) for matrix in self.matrices]
            elif self.config.vocabulary == "shared":
                self._scorers.append(engine.lm_head)
            else:
                self._scorers.append(packed_linear(self.matrix(backbone, 0), self.bias(backbone)))
        scorer = self._scorers[head if len(self._scorers) > 1 else 0]
        return scorer(states if own else states.to(backbone.dtype)).float()

    def best(self, scores: Tensor, width: int, temperature: float | None) -> tuple[Tensor, Tensor]:
        """Returns log confidences and token ids [N, width] of the best guesses by scores [N, M], best first.

        Without a temperature, as for static trees, the scores themselves stand for the confidences.
        """
        scaled = scores if temperature is None else scores / temperature
        best = scaled.topk(min(width, scaled.shape[-1]), dim=-1)
        log_p = best.values if temperature is None else best.values - scaled.logsumexp(-1, keepdim=True)
        return log_p, self.draft_ids[best.indices]

    def at_once(self, depth: int, compute: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> Guess:
        """Returns the guesses by scores that no draft token changes, the bias apart.

        compute(*inputs) gives the scores [B, M] of each of `depth` heads.
        """
        scores = torch.stack(list(compute(*inputs)))

        def guess(head: int, width: int, temperature: float | None, level: Frontier) -> tuple[Tensor, Tensor]:
            if self.conditional is None:
                log_p, ids = self.best(scores[head], width, temperature)
                owner = owners(level.counts, ids.device)
                return log_p[owner], ids[owner]
            tokens = level.tokens.split(level.counts)
            log_p, indices = self.conditional.best(scores[head], tokens, width, temperature)
            return log_p, self.draft_ids[indices]

        return guess

    # Files

    def named_weights(self) -> dict[str, Tensor]:
        """Returns every weight under its name in the file; the tensors are the parameters themselves."""
        return dict(self.named_parameters())

    def config_json(self) -> dict[str, Any]:
        """Returns the config as config.json has it."""
        return asdict(self.config)

    @classmethod
    def read_config(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Returns the config's fields from what config_json wrote."""
        return data

    def save(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Writes config.json and the weights in bf16."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: weight.detach().cpu().bfloat16().contiguous() for name, weight in self.named_weights().items()}
        if self.config.vocabulary == "draft":
            weights["draft_ids"] = self.draft_ids.cpu().int()
        save_file(weights, folder / self.weights_file)
        (folder / self.weights_file).chmod(0o644)  # as readable as the files beside it
        owner = provenance.get("backbone", {})
        base = owner.get("id") if isinstance(owner, dict) else owner
        config = {"drafter": self.name, "base_model_name_or_path": base, **self.config_json()}
        write_json(folder / "config.json", {**config, "provenance": provenance})
