"""What drafters of K heads share: the vocabulary matrices at their end, the loss, the guesses, the files."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.backbone import Backbone
from medusa_cli.drafters.base import PLAIN, Batch, Drafter, Losses, Objective
from medusa_cli.drafters.checked import read_heads
from medusa_cli.drafters.conditional import Conditional
from medusa_cli.drafters.config import VOCABULARIES, HeadsConfig, check_vocabulary
from medusa_cli.drafters.losses import heads_loss
from medusa_cli.engines.kernels import Kernel, Rounded, kernels_for
from medusa_cli.engines.kernels.modules import pack_linears
from medusa_cli.engines.tracing import Computation, Repeated
from medusa_cli.runs.files import write_json
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
        vocabulary: Any = "draft",
        draft_ids: Tensor | None = None,
        matrices: Any = "each",
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
        self._repeated: dict[Hashable, Repeated] = {}

    def fast(self, name: str) -> Any:
        """A copy of the submodule `name` with its linear layers packed for drafting."""
        if name not in self._fast:
            self._fast[name] = copy.deepcopy(getattr(self, name))
            pack_linears(self._fast[name], self.kernel)
        return self._fast[name]

    def repeated(self, what: Hashable, compute: Computation, *inputs: Tensor) -> Tensor:
        """compute(*inputs), over the fast copies alone: what comes a few times under one name `what` is traced.

        Forks share it, so nothing of a sequence's own may be in it but what the inputs bring.
        """
        # Rough kernels choose by the rows, which are the first input's; others, as a cache's, grow with every step.
        rows = None if self.kernel.exact else inputs[0].shape
        if (what, rows) not in self._repeated:
            never = inputs[0].device.type != "cpu" or self.config.vocabulary == "shared"
            self._repeated[what, rows] = Repeated(compute, self._products, never=never)
        return self._repeated[what, rows](*inputs)

    def _products(self) -> list[nn.Module]:
        """Everything that multiplies by packed weights."""
        return [*self._fast.values(), *(one for one in self._scorers if isinstance(one, nn.Module))]

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

    def bias(self, backbone: Backbone) -> Tensor | None:
        """What the lm_head adds to the scores [M] of heads that have no matrices of their own; None where nothing."""
        return None if len(self.matrices) else self.of_vocabulary(backbone.lm_head_bias)

    def of_vocabulary(self, rows: Any) -> Any:
        """Of rows for each token of the model [V, ..], those of the tokens that the heads score [M, ..]; None stays."""
        whole = rows is None or self.config.vocabulary != "draft"
        return rows if whole else rows[self.draft_ids.to(rows.device)]

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
            found: Tensor = backbone.engine.lm_head(states.to(backbone.dtype))
            return found.float()
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

    def loss(self, backbone: Backbone, batch: Batch, objective: Objective = PLAIN) -> Losses:
        """The sum of the heads' losses, as `losses.heads_loss` has it."""
        return heads_loss(self, backbone, batch, objective)

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
        rows, last, bias = batch.learnt, len(batch.next) - 1, self.bias(backbone)
        bias = None if bias is None else bias.to(self.dtype)
        for head in range(self.num_heads):
            before = batch.next[(rows + head).clamp(max=last)]
            read, matrix = self.product(backbone, head, states_of(head, rows), before)
            yield F.linear(read, matrix.to(read.dtype), bias).float()

    def named_weights(self) -> dict[str, Tensor]:
        """Every weight under the name it has in the file; the tensors are the parameters themselves."""
        return dict(self.named_parameters())

    def vocabulary_tensors(self) -> dict[str, Tensor]:
        """What the file says of the vocabulary, where it is a draft one."""
        return {"draft_ids": self.draft_ids.to("cpu", torch.int32)} if self.config.vocabulary == "draft" else {}

    @classmethod
    def id_shapes(cls, config: Any) -> dict[str, tuple[int, ...]]:
        """The tensors of whole numbers that a file has, from which `draft_ids_of` reads a draft vocabulary."""
        return {"draft_ids": (config.draft_vocab_size or 0,)} if config.vocabulary == "draft" else {}

    @staticmethod
    def draft_ids_of(tensors: dict[str, Tensor]) -> Tensor:
        """The draft vocabulary [M] that a file's tensors name."""
        return tensors["draft_ids"]

    def config_json(self) -> dict[str, Any]:
        """What config.json says of the architecture."""
        return asdict(self.config)

    @classmethod
    def read_config(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The fields of the config as config_json wrote them, by their names in it."""
        return data

    @classmethod
    def check_fit(cls, config: Any, backbone: Backbone) -> None:
        """UserError where a config asks for what the backbone has not."""

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
        """Read a drafter in the backbone's dtype, ready to draft; UserError where its files cannot be used."""
        drafter = read_heads(cls, folder, backbone)
        kernel = backbone.engine.kernel
        # Beside rounded weights plain ones would be the larger part of drafting; guesses may be rough.
        drafter._kernel = Rounded(8) if not kernel.exact else kernel
        return drafter.to(backbone.device, backbone.dtype).eval().requires_grad_(False)
