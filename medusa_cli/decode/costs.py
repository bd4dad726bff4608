"""The cost of whole steps on this machine, timed once for a drafter on a backbone by the loop that decodes."""

import logging
from collections.abc import Callable, Sequence

import torch

from medusa_cli.decode.decoder import Decoder
from medusa_cli.decode.sequence import Request
from medusa_cli.decode.stats import Step
from medusa_cli.drafters.base import Draft, Drafter
from medusa_cli.engine.autotune import Timings, keep_timings, machine_key, read_timings
from medusa_cli.model import Backbone
from medusa_cli.tree.search import Costs
from medusa_cli.tree.tree import Tree

CONTEXT = 256
ROUNDS = 4
# Products go by blocks of rows, so that the cost rises in steps: small sizes are timed one by one.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 24, 32, 48, 64)
# Sizes beyond one that costs so many plain steps are not timed.
HOPELESS = 6.0
# The depth of trees that stand for drafts from elsewhere, and the stamp of their costs.
ELSEWHERE, WITHOUT = 4, "no drafter"
log = logging.getLogger(__name__)


def measure_costs(
    backbone: Backbone,
    drafter: Drafter | None,
    *,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    sizes: Sequence[int] = SIZES,
    cuda_graphs: bool | None = None,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> Costs:
    """Times steps by nodes of the tree, and drafts by levels, after `context` tokens; returns the least of the rounds.

    Disturbances of a machine only add. Tokens are arbitrary: a step's time does not depend on them. Without a drafter,
    passes over drafts from elsewhere are timed.
    """
    uses_verify_pass = drafter is not None and drafter.uses_verify_pass
    heads = drafter.num_heads if drafter is not None else 0
    steps = (1 + uses_verify_pass) * (len(sizes) + heads)
    context = max(1, min(context, backbone.max_positions - (max(heads, ELSEWHERE) + 1) * (steps + 1)))
    prompt = (torch.arange(context) % backbone.vocab_size).tolist()
    decoder = Decoder(backbone, drafter, Tree.root_only(), cuda_graphs=cuda_graphs)
    depths = {depth: Tree.chain(depth) for depth in range(1, heads + 1)}
    known = len(getattr(drafter, "draft_ids", ())) or backbone.vocab_size  # no head has more guesses
    bushy = {nodes: _bushy(nodes, heads or ELSEWHERE) for nodes in sizes if nodes <= known}
    verify: dict[int, float] = {}
    draft: dict[int, float] = {}

    def step(tree: Tree) -> Step:
        decoder.use_tree(tree)
        if uses_verify_pass:
            decoder.step()
        blank = [Draft(torch.zeros(tree.size, dtype=torch.long, device=backbone.device), tree)]
        timed = decoder.step(blank if drafter is None else None)[0][1]
        on_progress(1)
        return timed

    for number in range(rounds + 1):
        # The prompt is still there from the round before: only its last token is run again.
        sequence, _ = decoder.admit(Request(prompt, backbone.max_positions, stop_ids=()))
        for depth, tree in depths.items():
            seconds = step(tree).draft_s
            if number:  # the first round warms up
                draft[depth] = min(seconds, draft.get(depth, seconds))
        for nodes, tree in list(bushy.items()):
            seconds = step(tree).verify_s
            if number:
                verify[nodes] = min(seconds, verify.get(nodes, seconds))
                if nodes > 16 and seconds > HOPELESS * verify[1]:
                    for larger in [size for size in bushy if size > nodes]:
                        del bushy[larger]
                    break
        decoder.cancel(sequence)
    return Costs(verify, draft)


def costs_for(
    backbone: Backbone,
    drafter: Drafter | None,
    stamp: str | None,
    *,
    again: bool = False,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> Costs:
    """Returns the kept costs of a drafter (by its stamp) on a backbone on this machine, or measures and keeps them.

    Without a drafter, those of the backbone's passes alone.
    """
    stamp = WITHOUT if drafter is None else stamp
    key = "|".join(
        (
            machine_key(backbone.config),
            str(backbone.device),
            backbone.engine.title,
            str(backbone.dtype),
            *((drafter.name, str(drafter.num_heads)) if drafter is not None else ()),
            stamp or "",
        )
    )
    kept = (None if again or stamp is None else read_timings(key, Timings)) or {}
    if 1 in kept.get("verify", {}) and (drafter is None or 1 in kept.get("draft", {})):
        return Costs(kept["verify"], kept.get("draft", {}))
    log.info("timing decoding steps on this machine, once for this drafter")
    costs = measure_costs(backbone, drafter, on_progress=on_progress)
    if stamp is not None:
        keep_timings(key, {"verify": costs.verify, "draft": costs.draft})
    return costs


def _bushy(nodes: int, depth: int) -> Tree:
    """Returns a tree of so many nodes: one path as deep as the heads go, and the other nodes below the root."""
    chain = [[0] * level for level in range(1, min(depth, nodes - 1) + 1)]
    return Tree.from_choices([*chain, *([rank] for rank in range(1, nodes - len(chain)))])
