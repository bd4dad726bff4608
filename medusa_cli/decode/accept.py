"""Acceptance of draft tokens: by the model's own choice, or typical acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from medusa_cli.decode.sampler import Sampler
from medusa_cli.device import upload
from medusa_cli.tree import Draft
from medusa_cli.tree.tree import PADDING, ROOT_PARENT

# The accepted nodes from the root on, and the bonus token that the model adds after them.
Path = tuple[list[int], int]


def accept(
    logits: Tensor,
    drafts: Sequence[Draft],
    samplers: Sequence[Sampler],
    likeliest: Tensor | None = None,
) -> list[Path]:
    """Returns each draft's accepted path by the model's logits [B, N, V] after each node.

    Padded rows are not read. likeliest: the tokens [B, N] of the largest logits, where they are
    known. Logits processors work on the nodes that are visited, in their order: they see the same
    text as without drafts.
    """
    fast = any(sampler.greedy and sampler.processors is None for sampler in samplers)
    best: list[list[int]] = []
    if fast:
        best = (logits.argmax(-1) if likeliest is None else likeliest).tolist()
    paths = []
    for i, (draft, sampler) in enumerate(zip(drafts, samplers, strict=True)):
        scores = logits[i, : draft.tree.size]
        if sampler.sampling.mode == "typical" and not sampler.greedy:
            paths.append(_typical(scores, draft, sampler))
        elif sampler.greedy and sampler.processors is None:
            paths.append(_follow(draft, best[i].__getitem__))
        else:
            paths.append(_chosen(scores, draft, sampler))
    return paths


def _chosen(scores: Tensor, draft: Draft, sampler: Sampler) -> Path:
    """Follows the sampler's choices, which plain decoding makes with the same numbers."""
    if sampler.processors is not None or scores.device.type == "cpu":  # few nodes are visited
        return _follow(draft, lambda node: sampler.choose(scores[node]))
    # Each read of a value waits for the device, so all nodes are drawn at once.
    uniforms = sampler.peek_uniforms(draft.tree.max_depth + 1)
    tokens = sampler.sample(scores, [uniforms[depth] for depth in draft.tree.depths])
    path = _follow(draft, tokens.__getitem__)
    sampler.advance(len(path[0]))
    return path


def _follow(draft: Draft, choose: Callable[[int], int]) -> Path:
    """Walks from the root to children that hold the token chosen after their parent."""
    tokens = draft.ids
    children = draft.tree.children
    path = [0]
    while True:
        token = choose(path[-1])
        child = next((node for node in children[path[-1]] if tokens[node] == token), None)
        if child is None:
            return path, token
        path.append(child)


def longest_path(
    chosen: Tensor, tokens: Tensor, depth: Tensor, parents: Tensor, tree_mask: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Follows the tokens chosen [B, N] after all nodes of B trees, without reading a value.

    It serves CUDA graphs; `accept` is its twin for the host: it draws only at the nodes that it
    visits, and runs logits processors. tokens, depth, parents [B, N] and tree_mask [B, N, N] are
    the trees; paths have at most `length` nodes. Returns the number of accepted nodes and the last
    one [B, 1], the path in order [B, P], and a mask of the path [B, N].
    """
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    steps = torch.arange(length, device=tokens.device)
    matches = (chosen.gather(1, parents.clamp(min=0)) == tokens) | (parents == ROOT_PARENT)
    # A node and all its ancestors match. The deepest wins, of equals the first.
    accepted = (matches[:, None] | ~tree_mask).all(-1) & (parents != PADDING)
    worth = depth * len(nodes) + (len(nodes) - 1 - nodes)
    last = worth.masked_fill(~accepted, -1).argmax(-1, keepdim=True)  # [B, 1]
    on_path = tree_mask.gather(1, last[..., None].expand(-1, -1, len(nodes)))[:, 0]  # [B, N]
    number = on_path.cumsum(1) - 1
    here = on_path[:, None] & (number[:, None] == steps[:, None])  # [B, P, N]
    count = depth.gather(1, last) + 1
    # Beyond a path's end every row stays in its place.
    return count, last, torch.where(steps < count, here.long().argmax(-1), steps), on_path


def _typical(logits: Tensor, draft: Draft, sampler: Sampler) -> Path:
    """Returns the longest path whose tokens all have p > min(epsilon, delta * exp(-H)) (Medusa, section 3.3.1).

    Of equally long paths the likeliest wins. The bonus token is the model's most likely one.
    """
    sampling = sampler.sampling
    processors = sampler.processors
    if processors is not None:
        logits = processors.along(draft, logits)
    log_p = (logits.float() / sampling.temperature).log_softmax(-1)  # [N, V]
    entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).nan_to_num(0.0).sum(-1)
    limit = torch.clamp(sampling.delta * torch.exp(-entropy), max=sampling.epsilon)  # [N]
    tree = draft.tree
    parents = upload(tree.parents[1:], logits.device, torch.long)
    scores = log_p[parents, draft.tokens[1:]]  # [N - 1]
    plausible = (scores.exp() > limit[parents]).tolist()
    totals: list[float | None] = [0.0]
    best = 0
    best_key = (0, 0.0)
    for node, (score, passes) in enumerate(zip(scores.tolist(), plausible, strict=True), 1):
        above = totals[tree.parents[node]]
        totals.append(above + score if passes and above is not None else None)
        total = totals[-1]
        if total is not None and (tree.depths[node], total) > best_key:
            best = node
            best_key = (tree.depths[node], total)
    path = tree.path(best)
    bonus = int(logits[best].float().argmax())
    if processors is not None:
        processors.extend([*(draft.ids[node] for node in path[1:]), bonus])
    return path, bonus
