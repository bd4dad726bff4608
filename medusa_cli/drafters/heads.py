"""A static tree level by level, for drafters whose guesses depend on those before them."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.drafters.base import (
    Batch,
    Draft,
    Drafter,
    HeadsConfig,
    NewTokens,
)
from medusa_cli.engine.jit import Computation, TracedModule
from medusa_cli.engine.kernels import Kernel, kernels_for, pack_linears
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.io import write_json
from medusa_cli.tree import DynamicTree, Tree, TreeBuilder

if TYPE_CHECKING:
    from typing_extensions import Self


VOCABULARIES = ("draft", "own", "shared")
MATRICES = ("each", "one")


def check_vocabulary(
    name: str,
    known: Sequence[str],
    vocabulary: Any,
    draft_ids: Tensor | None,
    matrices: Any,
    rank: int | None,
    hidden_size: int,
) -> None:
    """UserError for a vocabulary or matrices that a kind of drafter, of a name, cannot have; known: what it can."""
    if vocabulary not in known:
        fault = "unknown" if vocabulary not in VOCABULARIES else f"none that {name} can score"
        raise UserError(f"the vocabulary {vocabulary!r} is {fault}", f"use one of {', '.join(known)}")
    if matrices not in MATRICES:
        raise UserError(f"the matrices {matrices!r} are unknown", f"use one of {', '.join(MATRICES)}")
    if vocabulary == "draft" and (draft_ids is None or not len(draft_ids)):
        raise UserError("a draft vocabulary needs its token ids", "give draft_ids")
    if rank is not None and (vocabulary == "shared" or not 1 <= rank < hidden_size):
        raise UserError(
            f"vocabulary matrices of rank {rank} cannot be",
            f"use a rank below {hidden_size}, and the vocabulary draft or own",
        )


@dataclass(frozen=True)
class Level:
    """The nodes of one depth: their ids, ranks and the rows of their parents [n]; which of them have children.

    A row is a place among the nodes of the depth above that have children; paths [rows, depth] are the nodes from the
    root to each of those.
    """

    nodes: Tensor
    rows: Tensor
    ranks: Tensor
    inner: Tensor
    paths: Tensor
    width: int


@lru_cache(maxsize=64)
def levels(tree: Tree, device: torch.device) -> list[Level]:
    """The levels of a tree below its root."""
    found = []
    row = {0: 0}  # nodes of the level above that have children -> row
    for depth in range(1, tree.max_depth + 1):
        nodes = [node for node in range(tree.size) if tree.depths[node] == depth]
        inner = [i for i, node in enumerate(nodes) if tree.children[node]]
        rows = torch.tensor([row[tree.parents[node]] for node in nodes], device=device)
        ranks = torch.tensor([tree.ranks[node] for node in nodes], device=device)
        inside = torch.tensor(inner, dtype=torch.long, device=device)
        paths = torch.tensor([tree.path(node) for node in row], device=device)
        found.append(Level(torch.tensor(nodes, device=device), rows, ranks, inside, paths, tree.widths[depth - 1]))
        row = {nodes[i]: place for place, i in enumerate(inner)}
    return found


# In drafting only so many of a head's best guesses are scored again: what the bias lifts from further down is rare.
CANDIDATES = 128


@dataclass(frozen=True)
class Candidates:
    """A head's best guesses for B sequences: scores [B, C], places in the vocabulary [B, C], their rows [B, C, r]."""

    scores: Tensor
    places: Tensor
    rows: Tensor


class Conditional(nn.Module):
    """Adds after @ before[token] to the scores [M] of any head; at first it adds nothing.

    before [V, r] of the token that is drafted one place earlier, after [M, r] of the guesses; one pair for all heads.
    """

    def __init__(self, tokens: int, guesses: int, rank: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(tokens, rank) * rank**-0.25)
        self.after = nn.Parameter(torch.zeros(guesses, rank))

    def joined(self, states: Tensor, matrix: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """States [n, H] and a matrix [M, H] whose product has the bias of tokens [n] in it, both [.., H + r]."""
        before = F.embedding(tokens, self.before).to(states.dtype)
        return torch.cat([states, before], dim=-1), torch.cat([matrix, self.after.to(matrix.dtype)], dim=-1)

    def narrowed(self, scores: Tensor, least: int) -> Candidates:
        """The best of scores [B, M]: CANDIDATES of them, `least` if that is more."""
        best = scores.topk(min(max(CANDIDATES, least), scores.shape[-1]), dim=-1)
        return Candidates(best.values, best.indices, self.after[best.indices])

    def scored(self, found: Candidates, tokens: Tensor) -> Tensor:
        """The candidates' scores [B, n, C] after each of tokens [B, n]."""
        return found.scores[:, None] + (F.embedding(tokens, self.before) @ found.rows.transpose(1, 2)).float()

    def best(self, scores: Tensor, tokens: Tensor, width: int) -> Tensor:
        """The places [B, n, width] of the best guesses by scores [B, M] after each of tokens [B, n]."""
        found = self.narrowed(scores, width)
        chosen = self.scored(found, tokens).topk(width, dim=-1).indices
        return found.places[:, None].expand(-1, chosen.shape[1], -1).gather(2, chosen)

    def confident(self, scores: Tensor, tokens: Tensor, width: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Log confidences and places [n, width] of the best guesses by scores [1, M] after each of tokens [n].

        What is no candidate keeps its share as if nothing were known of the token before.
        """
        found = self.narrowed(scores, width)
        again = self.scored(found, tokens[None])[0] / temperature  # [n, C]
        rest = (scores / temperature).scatter(1, found.places, -torch.inf).logsumexp(-1)
        best = again.topk(min(width, again.shape[-1]), dim=-1)
        whole = torch.logaddexp(again.logsumexp(-1), rest)
        return best.values - whole[:, None], found.places[0][best.indices]


Scoring = Callable[..., Sequence[Tensor]]


def drafts_of(
    drafter: "HeadDrafter", score: Scoring, inputs: Sequence[Tensor], shape: Tree | DynamicTree, roots: Tensor
) -> list[Draft]:
    """Fill each node with the guess of its head and rank, or grow trees over the heads' confidences.

    score(*inputs): rows [B, M] for each head that the shape needs; roots [B].
    """
    if not shape.max_depth:
        return [Draft(root, Tree.root_only()) for root in roots[:, None]]
    scores = drafter.repeated(("scores", shape.max_depth), lambda *given: torch.stack(list(score(*given))), *inputs)
    if isinstance(shape, DynamicTree):
        return [_grow(drafter, scores[:, i : i + 1], shape, roots[i]) for i in range(len(roots))]
    return [Draft(tokens, shape) for tokens in fill(drafter, scores, shape, roots)]


def _grow(drafter: "HeadDrafter", scores: Tensor, growth: DynamicTree, root: Tensor) -> Draft:
    growing, nodes = TreeBuilder(growth, int(root)), [0]
    for head, row in enumerate(scores):
        if not nodes:
            break
        nodes = growing.extend(nodes, *_offered(drafter, head, row, [growing.tokens[node] for node in nodes], growth))
    grown, drafted = growing.tree()
    return Draft(torch.tensor(drafted, device=root.device), grown)


def _offered(
    drafter: "HeadDrafter", head: int, row: Tensor, nodes: list[int], growth: DynamicTree
) -> tuple[list[list[float]], list[list[int]]]:
    """Log confidences and tokens of a head's best guesses below each node of a token, by its scores [1, M]."""
    if drafter.conditional is None:
        log_p, tokens = drafter.confidences(head, row, growth)
        return log_p * len(nodes), tokens * len(nodes)
    before = torch.tensor(nodes, device=row.device)
    found, places = drafter.conditional.confident(row, before, growth.width, growth.temperature(head))
    return found.tolist(), drafter.draft_ids[places].tolist()


def fill(drafter: "HeadDrafter", scores: Tensor, tree: Tree, roots: Tensor) -> Tensor:
    """Tokens [B, N] of a static tree for B sequences with roots [B], from scores [K, B, M] of the heads it needs."""
    if not tree.max_depth:
        return roots[:, None]
    if drafter.conditional is not None:
        return _fill_after(drafter, drafter.conditional, scores, tree, roots)
    best = scores.topk(max(tree.widths), dim=-1).indices  # [K, B, widest]
    heads, ranks = _lookup(tree, roots.device)
    return torch.cat([roots[:, None], drafter.draft_ids[best[heads, :, ranks].T]], dim=1)


def _fill_after(drafter: "HeadDrafter", conditional: Conditional, scores: Tensor, tree: Tree, roots: Tensor) -> Tensor:
    tokens, before = roots[:, None].repeat(1, tree.size), roots[:, None]
    for row, level in zip(scores, levels(tree, roots.device), strict=False):
        best = conditional.best(row, before, level.width)
        tokens[:, level.nodes] = drafter.draft_ids[best[:, level.rows, level.ranks]]
        before = tokens[:, level.nodes[level.inner]]
    return tokens


@lru_cache(maxsize=64)
def _lookup(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor]:
    """Head index and rank of every node but the root, [N-1] each."""
    heads = torch.tensor([depth - 1 for depth in tree.depths[1:]], device=device)
    return heads, torch.tensor(tree.ranks[1:], device=device)


class HeadDrafter(Drafter):
    """K heads that end in vocabulary matrices [M, H]: one each, one for all, or the backbone's lm_head.

    vocabulary "own": M = V; "draft": M most frequent tokens, draft_ids [M] mapping back; "shared": the frozen lm_head.
    A subclass says how the states are made (`head_states`) and how a tree is drafted from them.
    """

    name: ClassVar[str]
    learning_rate: ClassVar[float] = 2e-3  # the peak where a recipe names none
    training_cost: ClassVar[float] = 1.0  # time of a training position relative to Medusa heads, for estimates
    autoregressive: ClassVar[bool] = False  # each head reads the tokens drafted before its own
    regress: ClassVar[float] = 0.0  # default of train.regress in stage 1, for autoregressive drafters
    soft: ClassVar[float | None] = None  # fixes the share of soft targets; None: train.soft
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

    @classmethod
    def sees_prompt(cls, settings: Any) -> bool:
        """Returns True if its own layers see a conversation from its first token, by a recipe or config."""
        return False

    @classmethod
    def default_taps(cls, depth: int) -> tuple[int, ...]:
        """Returns the numbers of layers after which it reads states by default, beside the last layer's."""
        return ()

    def first_input(self, prompt: NewTokens) -> NewTokens:
        """Returns all new prompt tokens if its own layers see the prompt, else the last one."""
        return prompt if self.sees_prompt(self.config) else prompt.last()

    @property
    def head_modules(self) -> Sequence[nn.Module]:
        """The module of each head, in a drafter whose heads share nothing; empty in others."""
        return ()

    @abstractmethod
    def head_states(self, backbone: Backbone, batch: Batch, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yields the states [n, H] of each head in turn at its rows [n] of the batch, for as many heads as `rows` has.

        Each head reads the true tokens before its target.
        """

    def train(self, mode: bool = True) -> "Self":
        self._forget_fast()
        super().train(mode)
        return self

    def _forget_fast(self) -> None:
        """Drop the packed copies: they are stale as soon as a weight may change."""
        self._fast: dict[str, nn.Module] = {}
        self._scorers: list[Callable[[Tensor], Tensor]] = []
        self._repeated: dict[Hashable, TracedModule] = {}

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
            self._repeated[what, rows] = TracedModule(compute, self._products, never=never)
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

    def confidences(self, head: int, scores: Tensor, growth: DynamicTree) -> tuple[list[list[float]], list[list[int]]]:
        """Log confidences and token ids of the best guesses, best first, for a head's scores [n, M]."""
        scaled = scores / growth.temperature(head)
        best = scaled.topk(min(growth.width, scaled.shape[-1]), dim=-1)
        log_p = best.values - scaled.logsumexp(-1, keepdim=True)
        return log_p.tolist(), self.draft_ids[best.indices].tolist()

    def vocabulary_index(self, device: torch.device) -> Tensor:
        """Returns token id -> row of the vocabulary matrices [V], -1 for tokens outside the draft vocabulary."""
        index = torch.full((self.config.vocab_size,), -1, dtype=torch.long, device=device)
        index[self.draft_ids.to(device)] = torch.arange(len(self.draft_ids), device=device)
        return index

    @torch.inference_mode()
    def logits(self, backbone: Backbone, batch: Batch) -> Iterator[Tensor]:
        """Yields each head's fp32 logits [n, M] at the n positions that are learnt, given the true tokens before."""
        batch = replace(batch, hidden=batch.hidden.to(self.dtype))
        rows, last, bias = batch.learnt, len(batch.next) - 1, self.bias(backbone)
        bias = None if bias is None else bias.to(self.dtype)
        for head, states in enumerate(self.head_states(backbone, batch, [rows] * self.num_heads)):
            before = batch.next[(rows + head).clamp(max=last)]
            read, matrix = self.product(backbone, head, states, before)
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
