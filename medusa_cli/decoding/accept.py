"""Which drafted tokens stand: greedy and exact follow the backbone's own choice, typical takes what is plausible."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from medusa_cli.decoding.sampling import Rule, Sampling
from medusa_cli.decoding.types import Verdict
from medusa_cli.drafters.base import Draft


def accept(logits: Tensor, drafts: Sequence[Draft], rules: Sequence[Rule]) -> list[Verdict]:
    """Judge B drafts by the backbone's logits [B, N, V] after each node; rows beyond a draft's nodes say nothing."""
    best = logits.argmax(-1).tolist() if any(rule.greedy for rule in rules) else []
    verdicts = []
    for number, (draft, rule) in enumerate(zip(drafts, rules, strict=True)):
        scores = logits[number, : draft.tree.size]
        if rule.greedy:
            verdicts.append(_follow(draft, best[number].__getitem__))
        elif rule.sampling.mode == "typical":
            verdicts.append(_typical(scores, draft, rule.sampling))
        else:
            verdicts.append(_sampled(scores, draft, rule))
    return verdicts


def _sampled(scores: Tensor, draft: Draft, rule: Rule) -> Verdict:
    """Follow the backbone's own draws: what is emitted is what plain decoding would draw by the same numbers."""
    depths, numbers = draft.tree.depths, rule.coming(draft.tree.max_depth + 1)
    if scores.device.type == "cpu":  # few nodes are visited, and each costs its softmax over the vocabulary
        verdict = _follow(draft, lambda node: rule.sample(scores[node, None], [numbers[depths[node]]])[0])
    else:  # where every look is a wait all are drawn at once; those of nodes that are not visited are never looked at
        verdict = _follow(draft, rule.sample(scores, [numbers[depth] for depth in depths]).__getitem__)
    rule.used(len(verdict.path))
    return verdict


def _follow(draft: Draft, chosen: Callable[[int], int]) -> Verdict:
    """Walk from the root to the child that holds the token chosen after its parent, for as long as there is one.

    With tokens sampled from the backbone this is exact: what is emitted is always the backbone's own draw.
    """
    tokens, children = draft.tokens.tolist(), draft.tree.children
    path = [0]
    while True:
        wanted = chosen(path[-1])
        child = next((node for node in children[path[-1]] if tokens[node] == wanted), None)
        if child is None:
            return Verdict(path, wanted)
        path.append(child)


def _typical(logits: Tensor, draft: Draft, sampling: Sampling) -> Verdict:
    """The longest path whose tokens all have p > min(epsilon, delta * exp(-H)); ties by likelihood (section 3.3.1).

    The token after it is the backbone's most likely one, which the next step takes unconditionally.
    """
    log_p = (logits.float() / sampling.temperature).log_softmax(-1)  # [N, V]
    entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).nan_to_num(0.0).sum(-1)
    limit = torch.clamp(sampling.delta * torch.exp(-entropy), max=sampling.epsilon).tolist()
    parents, tree = draft.tree.parents, draft.tree
    rows = torch.tensor(parents[1:], dtype=torch.long, device=logits.device)
    scores = log_p[rows, draft.tokens[1:]].tolist()
    best, best_key = 0, (0, 0.0)
    likelihood: list[float | None] = [0.0]
    for node in range(1, tree.size):
        above, score = likelihood[parents[node]], scores[node - 1]
        accepted = above is not None and torch.exp(torch.tensor(score)).item() > limit[parents[node]]
        likelihood.append(above + score if accepted and above is not None else None)
        total = likelihood[-1]
        if total is not None and (tree.depths[node], total) > best_key:
            best, best_key = node, (tree.depths[node], total)
    return Verdict(tree.path(best), int(logits[best].float().argmax()))
