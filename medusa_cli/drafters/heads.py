"""What drafters of K heads share: the vocabulary matrices at their end, the loss, the guesses, the files."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.backbone import Backbone
from medusa_cli.drafters.base import Batch, Drafter, Losses
from medusa_cli.drafters.conditional import Conditional
from medusa_cli.drafters.config import VOCABULARIES, HeadsConfig, check_vocabulary
from medusa_cli.drafters.cross_entropy import ROWS, linear_cross_entropy
from medusa_cli.engines.kernels import Kernel, Rounded, kernels_for
from medusa_cli.engines.kernels.modules import pack_linears
from medusa_cli.errors import UserError
from medusa_cli.runs.files import read_json, write_json
from medusa_cli.tree import Growth

if TYPE_CHECKING:
    from typing_extensions import Self

# Turns (head, rows of the batch [n]) into the states [n, H] that the head's vocabulary matrix reads.
Encoded = Callable[[int, Tensor], Tensor]


class HeadDrafter(Drafter):
    """K heads that end in vocabulary matrices [M, H]: one each, one for all, or the backbone's lm_head.

    vocabulary "own": M = V; "draft": M most frequent tokens, draft_ids [M] mapping back; "shared": the frozen lm_head.
    A subclass says how the states are made (`encode`) and how a tree is drafted from them.
    """

    weights_file: ClassVar[str] = "drafter.safetensors"
    config_class: ClassVar[type[HeadsConfig]] = HeadsConfig
    settings: ClassVar[tuple[str, ...]] = ()  # the recipe's drafter keys that this kind alone reads
    vocabularies: ClassVar[tuple[str, ...]] = VOCABULARIES  # what its heads can score; without "own" nothing is learnt
    draft_ids: Tensor
    _kernel: Kernel | None = None  # how it multiplies when it drafts; None: as its type wants it

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_heads
        rows = {"draft": config.draft_vocab_size or 0, "own": config.vocab_size, "shared": 0}[config.vocabulary]
        count = 0 if not rows or "own" not in self.vocabularies else 1 if config.matrices == "one" else config.num_heads
        inner = config.rank or config.hidden_size
        self.matrices = nn.ParameterList([nn.Parameter(torch.empty(rows, inner)) for _ in range(count)])
        # The inner factors of matrices of low rank; without a rank there are none.
        self.factors = nn.ParameterList(
            [nn.Parameter(torch.empty(inner, config.hidden_size)) for _ in range(count if config.rank else 0)]
        )
        ids = torch.arange(config.vocab_size) if config.vocabulary != "draft" else torch.zeros(rows, dtype=torch.long)
        self.register_buffer("draft_ids", ids, persistent=False)
        conditional = config.conditional
        self.conditional = Conditional(config.vocab_size, len(ids), conditional) if conditional else None
        self._forget_fast()

    @classmethod
    def create(
        cls,
        backbone: Backbone,
        num_heads: int = 5,
        num_layers: int = 1,
        vocabulary: str = "draft",
        draft_ids: Tensor | None = None,
        matrices: str = "each",
        rank: int | None = None,
        **own: Any,
    ) -> "Self":
        """A fresh fp32 drafter, its matrices copied from the backbone's lm_head; draft_ids [M] for "draft".

        Matrices of low rank start as the best approximation of that rank.
        """
        asked = (vocabulary, draft_ids, matrices, rank, backbone.hidden_size)
        check_vocabulary(cls.name, cls.vocabularies, *asked)
        size = len(draft_ids) if vocabulary == "draft" and draft_ids is not None else None
        sizes = (num_heads, num_layers, backbone.hidden_size, backbone.vocab_size)
        drafter = cls(cls.config_class(*sizes, vocabulary, size, matrices, rank, **own))
        if vocabulary == "draft" and draft_ids is not None:
            drafter.draft_ids.copy_(draft_ids)
        rows = backbone.lm_head_weight[drafter.draft_ids.to(backbone.lm_head_weight.device)]
        if rank is not None:
            left, scales, right = torch.linalg.svd(rows.float(), full_matrices=False)
            rows = left[:, :rank] * scales[:rank].sqrt()
            for factor in drafter.factors:
                factor.data.copy_(scales[:rank, None].sqrt() * right[:rank])
        for matrix in drafter.matrices:
            matrix.data.copy_(rows)
        return drafter.to(backbone.device)

    @abstractmethod
    def encode(self, backbone: Backbone, batch: Batch) -> Encoded:
        """Prepare a batch; the result gives head k's states at rows [n], the true tokens before its target known."""

    def train(self, mode: bool = True) -> "Self":
        self._forget_fast()
        super().train(mode)
        return self

    def _forget_fast(self) -> None:
        """Drop the packed copies: they are stale as soon as a weight may change."""
        self._fast: dict[str, nn.Module] = {}
        self._scorers: list[Callable[[Tensor], Tensor]] = []

    def fast(self, name: str) -> Any:
        """A copy of the submodule `name` with its linear layers packed for drafting."""
        if name not in self._fast:
            self._fast[name] = copy.deepcopy(getattr(self, name))
            pack_linears(self._fast[name], self.kernel)
        return self._fast[name]

    @property
    def kernel(self) -> Kernel:
        """How its linear layers and vocabulary matrices are multiplied with when it drafts."""
        return self._kernel or kernels_for(self.dtype, next(self.parameters()).device)[-1]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def embed(self, backbone: Backbone, tokens: Tensor) -> Tensor:
        """The backbone's embeddings [n, H] scaled to unit root mean square: raw ones are far smaller than states."""
        embedded = backbone.embedding(tokens).to(self.dtype)
        return F.rms_norm(embedded, embedded.shape[-1:])

    def matrix(self, backbone: Backbone, head: int) -> Tensor:
        """The vocabulary matrix [M, H] (or [M, r]) of a head (from 0)."""
        if self.config.vocabulary == "shared":
            return backbone.lm_head_weight
        return self.matrices[head if len(self.matrices) > 1 else 0]

    def inner(self, head: int, states: Tensor) -> Tensor:
        """What a head's vocabulary matrix reads of its states [n, H]: themselves, or their part of low rank [n, r]."""
        return F.linear(states, self.factors[head if len(self.factors) > 1 else 0]) if self.factors else states

    def product(self, backbone: Backbone, head: int, states: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """What a head's scores are the product of, [n, ..] and [M, ..], for states [n, H] and the tokens before [n]."""
        read, matrix = self.inner(head, states), self.matrix(backbone, head)
        return (read, matrix) if self.conditional is None else self.conditional.joined(read, matrix, before)

    def score(self, backbone: Backbone, head: int, states: Tensor) -> Tensor:
        """Logits fp32 [n, M] of a head for states [n, H]: top-k over bf16 is several times slower than over fp32."""
        states = self.inner(head, states)
        if self.config.vocabulary == "shared":
            return F.linear(states, backbone.lm_head_weight.to(states.dtype)).float()
        if not self._scorers:
            # Forks share this very list.
            self._scorers += [self.kernel.pack(matrix.detach()) for matrix in self.matrices]
        return self._scorers[head if len(self._scorers) > 1 else 0](states).float()

    def confidences(self, head: int, scores: Tensor, growth: Growth) -> tuple[list[list[float]], list[list[int]]]:
        """Log confidences and token ids of the best guesses, best first, for a head's scores [n, M]."""
        scaled = scores / growth.temperature(head)
        best = scaled.topk(min(growth.width, scaled.shape[-1]), dim=-1)
        log_p = best.values - scaled.logsumexp(-1, keepdim=True)
        return log_p.tolist(), self.draft_ids[best.indices].tolist()

    def loss(
        self, backbone: Backbone, batch: Batch, decay: float = 0.8, soft: float = 0.0, regress: float = 0.0
    ) -> Losses:
        """Sum over heads k of decay^k times the mean cross-entropy to the token k places on (equation 1).

        soft is the weight of the backbone's own distribution there in the target, the rest being the token itself.
        A target outside the draft vocabulary can be neither learnt nor guessed: it is left out of the
        cross-entropy and counts as a miss in the accuracy. regress weighs the mean smooth L1 distance between the
        states of the heads that are `told` and those that the backbone had at the targets' places (as in EAGLE,
        arXiv:2401.15077), which say more than a token. A head that is not told could but learn the mean of the states
        that may come, which draws it away from any of their tokens. It is in the total alone.
        """
        place = self.places(batch.next.device)
        none = torch.zeros((), dtype=torch.long, device=batch.next.device)
        states_of = self.encode(backbone, batch)
        teacher = self._teacher(backbone, batch) if soft else None
        per_head, apart, correct, counted = [], [], [], []
        for k in range(1, self.num_heads + 1):
            rows = batch.targets(k)
            targets = place[batch.next[rows + k]]
            counted.append(none + len(targets))
            known = targets >= 0
            if not known.any():
                # Zero by way of the head's states: a pass back through a split model must be made all the same.
                per_head.append(states_of(k - 1, none[None][:0]).sum() * 0.0)
                correct.append(none)
                continue
            rows = rows[known]
            aim = None if teacher is None else teacher[rows + k]
            states = states_of(k - 1, rows)
            if regress and k <= self.told:
                goals = batch.hidden[rows + k, -self.config.hidden_size :].detach().float()
                apart.append(decay**k * F.smooth_l1_loss(states.float(), goals))
            read, matrix = self.product(backbone, k - 1, states, batch.next[rows + k - 1])
            loss, hits = linear_cross_entropy(read, matrix, targets[known], aim, soft)
            per_head.append(loss)
            correct.append(hits)
        total = torch.stack([decay**k * loss for k, loss in enumerate(per_head, 1)]).sum()
        if apart:
            total = total + regress * torch.stack(apart).sum()
        return Losses(total, per_head, torch.stack(correct), torch.stack(counted))

    @torch.no_grad()
    def _teacher(self, backbone: Backbone, batch: Batch) -> Tensor:
        """The backbone's probabilities [P, M] over the heads' vocabulary at every position."""
        final = batch.hidden[:, -self.config.hidden_size :]
        rows = backbone.lm_head_weight
        if self.config.vocabulary == "draft":
            rows = rows[self.draft_ids.to(rows.device)]
        probabilities = F.linear(final, rows.to(final.dtype))
        for block in probabilities.split(ROWS):
            block.copy_(block.float().softmax(-1))
        return probabilities

    def places(self, device: torch.device) -> Tensor:
        """Token id -> row of the vocabulary matrices [V], -1 for tokens outside the draft vocabulary."""
        place = torch.full((self.config.vocab_size,), -1, dtype=torch.long, device=device)
        place[self.draft_ids.to(device)] = torch.arange(len(self.draft_ids), device=device)
        return place

    @torch.inference_mode()
    def logits(self, backbone: Backbone, batch: Batch) -> Iterator[Tensor]:
        """Each head's fp32 logits [n, M] at the positions that are learnt, the true tokens before its target known."""
        batch = replace(batch, hidden=batch.hidden.to(self.dtype))
        states_of = self.encode(backbone, batch)
        rows, last = batch.learnt, len(batch.next) - 1
        for head in range(self.num_heads):
            before = batch.next[(rows + head).clamp(max=last)]
            read, matrix = self.product(backbone, head, states_of(head, rows), before)
            yield F.linear(read, matrix.to(read.dtype)).float()

    def named_weights(self) -> dict[str, Tensor]:
        """Every weight under the name it has in the file; the tensors are the parameters themselves."""
        return dict(self.named_parameters())

    def vocabulary_tensors(self) -> dict[str, Tensor]:
        """What the file says of the vocabulary, where it is a draft one."""
        return {"draft_ids": self.draft_ids.to("cpu", torch.int32)} if self.config.vocabulary == "draft" else {}

    @staticmethod
    def draft_ids_of(tensors: dict[str, Tensor]) -> Tensor:
        """The draft vocabulary [M] that a file's tensors name."""
        return tensors["draft_ids"]

    def config_json(self) -> dict[str, Any]:
        """What config.json says of the architecture."""
        return asdict(self.config)

    @classmethod
    def read_config(cls, data: dict[str, Any]) -> HeadsConfig:
        """The config that config_json wrote; KeyError where a size is missing."""
        needed = ("num_heads", "num_layers", "hidden_size", "vocab_size")
        known = {one.name for one in fields(cls.config_class)} - set(needed)
        return cls.config_class(*(data[key] for key in needed), **{k: data[k] for k in known if k in data})

    def save(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write config.json and the weights in bf16."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
            for name, tensor in self.named_weights().items()
        }
        tensors |= self.vocabulary_tensors()
        save_file(tensors, folder / self.weights_file)
        (folder / self.weights_file).chmod(0o644)  # as readable as what lies beside it
        owner = provenance.get("backbone", {})
        base = owner.get("id") if isinstance(owner, dict) else owner
        config = {"drafter": self.name, "base_model_name_or_path": base, **self.config_json()}
        write_json(folder / "config.json", {**config, "provenance": provenance})

    @classmethod
    def load(cls, folder: Path, backbone: Backbone) -> "Self":
        """Read a drafter in the backbone's dtype, ready to draft."""
        data = read_json(folder / "config.json", "the drafter's config")
        try:
            drafter = cls(cls.read_config(data))
            tensors = load_file(folder / cls.weights_file)
            with torch.no_grad():
                for name, tensor in drafter.named_weights().items():
                    tensor.copy_(tensors[name])
                if drafter.config.vocabulary == "draft":
                    drafter.draft_ids.copy_(cls.draft_ids_of(tensors))
        except (KeyError, OSError, RuntimeError, TypeError, ValueError, SafetensorError) as reason:
            raise UserError(
                f"the drafter in {folder} cannot be read: {type(reason).__name__}: {reason}",
                "train it again, or give another --drafter",
            ) from reason
        kernel = backbone.engine.kernel
        # Beside rounded weights plain ones would be the larger part of drafting; guesses may be rough.
        drafter._kernel = Rounded(8) if not kernel.exact else kernel
        return drafter.to(backbone.device, backbone.dtype).eval().requires_grad_(False)
