"""Acceptance of draft tokens, either by comparison with the model's choices or by typical acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from medusa_cli.decode.sampler import Sampler
from medusa_cli.device import numbered
from medusa_cli.tree import Draft
from medusa_cli.tree.tree import PADDING, ROOT_PARENT

# The accepted nodes from the root on, and the bonus token that the model adds after the last node.
Path = tuple[list[int], int]


def accept(
    logits: Tensor,
    drafts: Sequence[Draft],
    samplers: Sequence[Sampler],
    likeliest: Tensor | None = None,
) -> list[Path]:
    """Returns the accepted path of each draft, given the model's logits [B, N, V] after each node.

    Logits of padding nodes are not read. likeliest [B, N]: the token with the largest logit after each node, if known.
    Logits processors run only at nodes that the search visits, from the root down, so they see the same texts as in
    plain decoding.
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
    """Returns the path of the tokens that the sampler chooses.

    Plain decoding chooses the same tokens, because it draws them with the same random numbers.
    """
    # The walk visits only a few nodes, so the token after a node is chosen only when the walk reaches the node.
    if sampler.processors is not None or scores.device.type == "cpu":
        return _follow(draft, lambda node: sampler.choose(scores[node]))
    # On a GPU, each read of a value waits for the device, so the tokens of all nodes are drawn at once.
    uniforms = sampler.peek_uniforms(draft.tree.max_depth + 1)
    tokens = sampler.sample(scores, [uniforms[depth] for depth in draft.tree.depths])
    path = _follow(draft, tokens.__getitem__)
    sampler.advance(len(path[0]))
    return path


def _follow(draft: Draft, choose: Callable[[int], int]) -> Path:
    """Returns the path on which each node holds the token chosen after its parent, and the bonus token."""
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
) -> tuple[Tensor, Tensor]:
    """Returns the accepted paths of B trees without reading a value from the device, as a CUDA graph requires.

    `accept` finds paths on the host; it also runs logits processors and, on a CPU, draws only at visited nodes. chosen
    [B, N]: the token chosen after each node. tokens, depth, parents [B, N] and tree_mask [B, N, N] describe the trees.
    length: P, the maximum number of nodes of a path. The first result [B, 2 + 2 P] holds the number of accepted nodes,
    the bonus token, the path's nodes in order and their tokens. The second result is a mask [B, N] of the path's nodes.
    """
    nodes = numbered(tokens.shape[1], tokens.device)
    steps = numbered(length, tokens.device)
    matches = (chosen.gather(1, parents.clamp(min=0)) == tokens) | (parents == ROOT_PARENT)
    # A node is accepted if it and all its ancestors match. The path ends at the deepest accepted
    # node; of several equally deep nodes, at the first.
    accepted = (matches[:, None] | ~tree_mask).all(-1) & (parents != PADDING)
    worth = depth * len(nodes) + (len(nodes) - 1 - nodes)
    last = worth.masked_fill(~accepted, -1).argmax(-1, keepdim=True)  # [B, 1]
    on_path = tree_mask.gather(1, last[..., None].expand(-1, -1, len(nodes)))[:, 0]  # [B, N]
    number = on_path.cumsum(1) - 1
    here = on_path[:, None] & (number[:, None] == steps[:, None])  # [B, P, N]
    count = depth.gather(1, last) + 1
    # Beyond the end of a path, each entry is its own index, so that the cache row stays in place.
    path = torch.where(steps < count, here.long().argmax(-1), steps)
    results = [count, chosen.gather(1, last), path, tokens.gather(1, path)]
    return torch.cat(results, dim=1), on_path


def _typical(logits: Tensor, draft: Draft, sampler: Sampler) -> Path:
    """Returns the longest path whose tokens all have p > min(epsilon, delta * exp(-H)) (Medusa, section 3.3.1).

    H is the entropy of the distribution after the token's parent. Among equally long paths, the most likely is
    returned. The bonus token is the model's most likely token after the path.
    """
    sampling = sampler.sampling
    processors = sampler.processors
    tree = draft.tree

    def processed(nodes: Sequence[int]) -> Tensor:
        rows = logits[nodes]
        return rows if processors is None else processors.along(draft, nodes, rows)

    best = 0
    totals = {0: 0.0}  # log probabilities of the plausible paths, by last node
    level = [0]
    # Entropies over a large vocabulary are expensive, so only those after plausible paths are computed.
    while parents := [node for node in level if tree.children[node]]:
        log_p = (processed(parents).float() / sampling.temperature).log_softmax(-1)  # [P, V]
        lowest = torch.finfo(log_p.dtype).min
        entropy = -(log_p.exp() * log_p.clamp(min=lowest)).nan_to_num(0.0).sum(-1)
        limit = torch.clamp(sampling.delta * torch.exp(-entropy), max=sampling.epsilon)  # [P]
        nodes = [child for parent in parents for child in tree.children[parent]]
        rows = [row for row, parent in enumerate(parents) for _ in tree.children[parent]]
        scores = log_p[rows, draft.tokens[nodes]]  # [C]
        plausible = (scores.exp() > limit[rows]).tolist()
        for node, score, passes in zip(nodes, scores.tolist(), plausible, strict=True):
            if passes:
                totals[node] = totals[tree.parents[node]] + score
        level = [node for node in nodes if node in totals]
        best = max(level, key=totals.__getitem__, default=best)
    path = tree.path(best)
    bonus = int(processed([best])[0].float().argmax())
    if processors is not None:
        processors.extend([*(draft.ids[node] for node in path[1:]), bonus])
    return path, bonus
