"""How sequences side by side choose their tokens, as tensors alone: what a captured step does in place of `Rule`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_cli.decoding.sampling import Rule, draw, nucleus
from medusa_cli.tree.tree import Tree

# All greedy; some sampled; some of those from the likeliest tokens alone.
GREEDY, WHOLE, CUT = "greedy", "whole", "cut"
# What is said of a sequence before its random numbers: whether it samples, temperature, top_p, top_k.
FIELDS = 4


def kind_of(rules: Sequence[Rule]) -> str:
    """What the sequences need together: each kind does what the ones before it do."""
    sampled = [rule.sampling for rule in rules if not rule.greedy]
    if not sampled:
        return GREEDY
    return CUT if any(one.top_p < 1 or one.top_k for one in sampled) else WHOLE


def demands(rules: Sequence[Rule], tree: Tree, kind: str) -> Tensor | None:
    """How each sequence chooses, and the numbers of its next tokens [B, FIELDS + depths]; None where all are greedy."""
    if kind == GREEDY:
        return None
    rows = []
    for rule in rules:
        said = [0.0, 1.0, 1.0, 0.0]
        if not rule.greedy:
            one = rule.sampling
            said = [1.0, one.temperature, one.top_p if one.top_p < 1 else 2.0, float(one.top_k)]  # 2: no sum gets there
        rows.append([*said, *(rule.coming(tree.max_depth + 1) if not rule.greedy else [0.0] * (tree.max_depth + 1))])
    return torch.tensor(rows, dtype=torch.double)


def choose(logits: Tensor, demands: Tensor, depth: Tensor, kind: str) -> Tensor:
    """The token after each node [B, N] by logits [B, N, V] and what `demands` says; depth [N] of the nodes."""
    best = logits.argmax(-1)
    if kind == GREEDY:
        return best
    sampled, heat, top_p, top_k = (one[:, None] for one in demands[:, :FIELDS].unbind(-1))  # [B, 1] each
    uniforms = demands[:, FIELDS:][:, depth]  # [B, N]
    weights = (logits / heat[..., None].float()).softmax(-1)
    drawn = draw(weights, uniforms)
    if kind == CUT:
        ordered, ids = weights.sort(dim=-1, descending=True)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill((rank >= top_k[..., None]) & (top_k[..., None] > 0), 0)
        ordered = nucleus(ordered / ordered.sum(-1, keepdim=True), top_p[..., None].float())
        among = ids.gather(-1, draw(ordered, uniforms)[..., None])[..., 0]
        # A sequence draws by its own numbers the same, whoever is beside it.
        drawn = torch.where((top_p < 1) | (top_k > 0), among, drawn)
    return torch.where(sampled > 0, drawn, best)
