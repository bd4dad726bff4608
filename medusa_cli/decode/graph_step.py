"""The decoding step that a CUDA graph runs, from draft tokens and trees to accepted paths.

Trees are inputs of the step. So one step serves all trees up to a maximum number of nodes, and all
batches up to a maximum number of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor

from medusa_cli.decode.accept import longest_path
from medusa_cli.decode.policy import ROOT
from medusa_cli.decode.sampler import Sampler, draw, nucleus
from medusa_cli.device import upload
from medusa_cli.drafters.base import NewTokens
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.slots import LayerSlots, NewTensors
from medusa_cli.engine import Cache
from medusa_cli.engine.engine import LayoutEngine
from medusa_cli.engine.plan import lay_out_at
from medusa_cli.tree import Draft, DynamicTree
from medusa_cli.tree.tensors import GrowingTrees, TreeTensors, outline
from medusa_cli.tree.tree import PADDING, unread_draft

# The maximum number of accepted nodes per path, and of tokens that a drafter reads in a graph.
DEPTHS = 32
# The parameters of a sequence, stored before its random numbers: 1 if the sequence samples (else 0),
# temperature, top-p and top-k.
NO_TOP_P = 2.0  # no sum of probabilities reaches this value
GREEDY = (0.0, 1.0, NO_TOP_P, 0.0)
FIELDS = len(GREEDY)
# Top-p and top-k choose among this many of the most likely tokens.
LIKELIEST = 1024

# The results of a step and the hidden states of the path.
Results = tuple[Tensor, Tensor]
# Turns a computation on fixed buffers into a function that replays the computation.
Capture = Callable[[Callable[[], Results]], Callable[[], Results]]
# The class that grows dynamic trees, and the function that finds longest paths.
TreeOperations = tuple[Callable[..., TreeTensors], Callable[..., tuple[Tensor, Tensor]]]


def sampling_params(samplers: list[Sampler], batch: int, count: int) -> Tensor:
    """Returns FIELDS parameters and `count` random numbers per sequence, [batch, FIELDS + count].

    The batch is padded with greedy sequences.
    """
    rows = [[*GREEDY, *[0.0] * count] for _ in range(batch)]
    for number, sampler in enumerate(samplers):
        if not sampler.greedy:
            sampling = sampler.sampling
            top_p = sampling.top_p if sampling.top_p < 1 else NO_TOP_P
            fields = (1.0, sampling.temperature, top_p, float(sampling.top_k))
            rows[number] = [*fields, *sampler.peek_uniforms(count)]
    return torch.tensor(rows, dtype=torch.double)


def choose(logits: Tensor, params: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the token chosen after each node [B, N].

    Also returns a mask [B, N]: False if top-p or top-k may select more than the LIKELIEST most likely
    tokens. logits [B, N, V]; params: the result of `sampling_params`; depth [B, N]: the nodes' depths.
    """
    fields = params[:, :FIELDS].unbind(-1)
    sampled, temperature, top_p, top_k = (field[:, None] for field in fields)  # [B, 1] each
    uniforms = params[:, FIELDS:].gather(1, depth)  # [B, N]
    weights = (logits / temperature[..., None].float()).softmax(-1)
    ids = weights.topk(min(LIKELIEST, weights.shape[-1]), dim=-1).indices.sort(dim=-1).values
    # The sort is stable: among equal weights, the lowest id comes first.
    ordered, order = weights.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    whole = ordered.shape[-1] == weights.shape[-1]
    cut = top_k > 0
    last = top_k[..., None].long().clamp(1, ordered.shape[-1]) - 1
    lowest = ordered.gather(-1, last.expand(*depth.shape, 1))
    # Tokens that tie with the k-th token stay.
    kept = ordered.masked_fill((ordered < lowest) & cut[..., None], 0)
    # Without top-k, probabilities are relative to the whole vocabulary.
    kept = kept / kept.sum(-1, keepdim=True).masked_fill(~cut[..., None], 1.0)
    # If the k-th token has no weight, as at a low temperature, tokens that tie with it have no
    # weight either.
    cut_off = (ordered[..., -1] < lowest[..., 0]) | (lowest[..., 0] == 0)
    enough = torch.where(cut, cut_off, (kept.sum(-1) >= top_p) | (top_p > 1)) | whole
    place = draw(nucleus(kept, top_p[..., None].float()), uniforms)
    among = ids.gather(-1, place[..., None])[..., 0]
    # A sequence without top-p and top-k draws from the whole vocabulary.
    drawn = torch.where((top_p < 1) | cut, among, draw(weights, uniforms))
    return torch.where(sampled > 0, drawn, logits.argmax(-1)), enough | (sampled == 0)


class GraphStep:
    """Runs steps with a fixed number of sequences and of nodes, on buffers that hold the inputs.

    The drafter drafts the tokens that the host does not know. With `limits`, dynamic trees grow in
    place of the nodes with unknown tokens. slots: the rows of the drafter's layers.
    """

    def __init__(
        self,
        engine: LayoutEngine,
        cache: Cache,
        batch: int,
        rows: int,
        taps: tuple[int, ...],
        sampled: bool,
        drafter: HeadDrafter | None,
        limits: DynamicTree | None,
        slots: LayerSlots | None,
    ) -> None:
        device = engine.backbone.device
        self._rows = rows
        self._count = min(rows, DEPTHS)
        self._engine = engine
        self._cache = cache
        self._taps = taps
        self._sampled = sampled
        self._drafter = drafter if rows > 1 else None
        self._slots = slots if rows > 1 else None
        self._limits = limits
        reads = 0 if self._slots is None else self._slots.rows
        # For each node, the bits of a mask in which the node sees only itself.
        self._own_bits = [1 << node if node < 63 else -(1 << 63) for node in range(rows)]
        # Each row holds the length of a slot, the depths, parents, ranks and tokens of N nodes, and
        # for each node the bits of the nodes that it sees. After these come the fields of NewTensors
        # for P new tokens, with the indices of these tokens in `hidden`.
        self._inputs = self._pack([0] * batch, [], []).to(device)  # [B, 1 + 5 N + 3 + 2 P]
        self.lengths = self._inputs[:, 0]
        fields = self._inputs[:, 1 : 1 + 5 * rows].unflatten(1, (5, rows))
        self._new = self._inputs[:, 1 + 5 * rows :]
        self.nodes, self.bits = fields[:, :4], fields[:, 4]
        self.depth, self.tokens = self.nodes[:, 0], self.nodes[:, 3]
        width = engine.backbone.hidden_size * len(taps)
        self.hidden = torch.zeros(batch * reads, width, dtype=engine.dtype, device=device)
        self.params = sampling_params([], batch, self._count).to(device)
        self._each_bit = torch.tensor(self._own_bits, device=device)
        self._ones = torch.ones_like(self.tokens)
        self._itself = torch.ones(batch, 1, 1, dtype=torch.bool, device=device)
        self._run_again: Callable[[], Results] = self._run

    def _pack(
        self, lengths: list[int], drafts: list[Draft], new: list[tuple[NewTokens, list[int]]]
    ) -> Tensor:
        """Returns the inputs of a run as one tensor on the host. new: the results of CudaGraphs._unread."""
        packed = []
        place = 0
        empty = unread_draft(0, ROOT)
        for slot, length in enumerate(lengths):
            draft = drafts[slot] if slot < len(drafts) else empty
            tree = draft.tree
            rest = [0] * (self._rows - tree.size)
            absent = [PADDING] * len(rest)
            row = [length, *tree.depths, *rest, *tree.parents, *absent, *tree.ranks, *rest]
            row += [*draft.ids, *rest, *tree.bits, *self._own_bits[tree.size :]]
            if self._slots is not None:
                start = 0
                first = 0
                following = [0]
                if slot < len(new):
                    tokens, following = new[slot]
                    start = tokens.start
                    first = place
                    place += len(following)
                more = [0] * (self._slots.rows - len(following))
                row += [start, self._slots.held(slot), len(following)]
                row += [*range(first, first + len(following)), *more, *following, *more]
            packed.append(row)
        # torch takes five times as long as numpy to convert lists.
        return torch.from_numpy(np.array(packed, dtype=np.int64))

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Captures the step while its buffers hold only the roots that follow the texts in the slots."""
        self._inputs.copy_(self._pack(self._cache.lengths[: len(self.lengths)], [], []))
        self._run()  # allocates the cache's buffers and rotary tables
        self._run_again = capture(self._run)

    @torch.inference_mode()
    def __call__(
        self,
        lengths: list[int],
        samplers: list[Sampler],
        drafts: list[Draft],
        guesses: Mapping[int, Draft],
        new: list[tuple[NewTokens, list[int]]],
    ) -> Results:
        """Returns the results [B, 2 + 2 P] and the hidden states of the path [B, P, H * taps].

        The results are the number of accepted nodes, the bonus token, the path of up to P nodes, and
        the path's tokens. 0 accepted nodes mean that LIKELIEST tokens are too few for top-p or top-k.
        """
        device = self._inputs.device
        size = len(self._inputs)
        self._inputs.copy_(upload(self._pack(lengths[:size], drafts, new), device))
        for slot, draft in guesses.items():
            self.tokens[slot, : draft.tree.size] = draft.tokens
        if new:
            hidden = torch.cat([tokens.hidden for tokens, _ in new])
            self.hidden[: len(hidden)] = hidden
        if self._sampled:
            self.params.copy_(upload(sampling_params(samplers, size, self._count), device))
        return self._run_again()

    def _run(self) -> Results:
        """Runs the step without reading the value of a tensor."""
        engine = self._engine
        if self._rows == 1:
            return self._run_roots()
        growing, follow = tree_operations(self.bits.device)
        tree_mask = (self.bits[..., None] & self._each_bit) != 0  # [B, N, N]
        trees = TreeTensors(self.nodes, tree_mask)
        if self._drafter is not None and self._slots is not None:
            start, held, count, *_ = self._new.unbind(1)
            places, following = self._new[:, 3:].chunk(2, dim=1)
            new = NewTensors(
                self.hidden[places], following, start, held, count, self._slots.buffers
            )
            if self._limits is not None:
                trees = growing(self._limits, self.nodes, tree_mask)
            self._drafter.fill(engine.backbone, new, trees)
        states, chosen, certain = self._verify(trees.tokens, trees.depth, trees.mask)
        results, on_path = follow(
            chosen, trees.tokens, trees.depth, trees.parents, trees.mask, self._count
        )
        path = results[:, 2 : 2 + self._count]
        self._cache.compact(self.lengths, path)
        if certain is not None:
            results[:, :1] *= (certain | ~on_path).all(1, keepdim=True)
        return results, states.gather(1, path[..., None].expand(-1, -1, states.shape[-1]))

    def _run_roots(self) -> Results:
        """Runs a step of only roots: each root is accepted, and its cache row is already in place."""
        states, chosen, certain = self._verify(self.tokens, self.depth, self._itself)
        count = self._ones if certain is None else certain.long()
        return torch.cat([count, chosen, self.depth, self.tokens], dim=1), states

    def _verify(
        self, tokens: Tensor, depth: Tensor, tree_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the nodes' states, the token chosen after each node, and the mask of `choose` (None if greedy)."""
        engine = self._engine
        layout = lay_out_at(
            self.lengths,
            tree_mask,
            depth,
            engine.masks,
            engine.backbone.max_positions,
            0,
            self._cache.capacity,
            by_length=engine.by_length,
            exact=engine.exact is not None,
        )
        states, final = engine.run(tokens, layout, self._cache, self._taps)
        logits = engine.backbone.finish_logits(engine.lm_head(final))
        if self._sampled:
            return states, *choose(logits.float(), self.params, depth)
        # 16-bit logits have the same order as their fp32 copies, so no copy is needed.
        return states, logits.argmax(-1), None


@cache
def tree_operations(device: torch.device) -> TreeOperations:
    """Returns the tree operations of graphs on a device: Triton kernels if these work there, else plain torch."""
    plain = GrowingTrees, longest_path
    if device.type != "cuda":
        return plain
    try:
        from medusa_cli.tree import kernels

        ours = kernels.KernelTrees, kernels.longest_path
        trees = sample_trees(device)
        pairs = zip(grown(*trees, *plain), grown(*trees, *ours), strict=True)
        return ours if all(torch.equal(*pair) for pair in pairs) else plain
    except Exception:  # errors of many types, if Triton is missing or does not know the GPU
        return plain


def sample_trees(device: torch.device) -> tuple[DynamicTree, Tensor, Tensor]:
    """Returns the limits, nodes and masks of two trees before their first level."""
    limits = DynamicTree(64, 3)
    tree = outline(limits)
    ids = unread_draft(5, tree).ids
    nodes = torch.tensor([tree.depths, tree.parents, tree.ranks, ids], device=device)
    return limits, nodes.repeat(2, 1, 1), tree.mask.to(device).repeat(2, 1, 1)


def grown(
    limits: DynamicTree,
    nodes: Tensor,
    mask: Tensor,
    growing: Callable[..., TreeTensors],
    follow: Callable[..., tuple[Tensor, Tensor]],
) -> list[Tensor]:
    """Returns the nodes and masks of two trees of three levels, and their longest paths if all guesses are right."""
    trees = growing(limits, nodes, mask)
    for head in range(limits.max_depth):
        rows = limits.budget if head else 1
        numbers = torch.arange(2 * rows * limits.width, device=nodes.device).view(2, rows, -1)
        # Some log confidences are equal, so ties are compared, too.
        trees.extend(head, (numbers * (7 + head) % 23) / -8.0, numbers)
    chosen = trees.tokens.scatter_reduce(1, trees.parents.clamp(min=0), trees.tokens, "amax")
    paths = follow(chosen, trees.tokens, trees.depth, trees.parents, trees.mask, DEPTHS)
    return [trees.nodes, trees.mask, *paths]
