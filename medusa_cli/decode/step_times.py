"""Durations of whole decoding steps on this machine, measured once per drafter and backbone."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from medusa_cli.decode.answer import Step
from medusa_cli.decode.cuda_graph import captures
from medusa_cli.decode.decoder import Decoder
from medusa_cli.decode.policy import DraftPolicy, policy_of
from medusa_cli.decode.sequence import Request
from medusa_cli.device import device_name
from medusa_cli.drafters.base import Drafter, NewTokens
from medusa_cli.engine.timing import (
    Curve,
    is_doubtful,
    keep_timings,
    machine_key,
    read_timings,
    watched,
)
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft, DynamicTree, Tree
from medusa_cli.tree.search import StepTimes

CONTEXT = 256
ROUNDS = 4
# Matmuls run in blocks of rows, so the cost rises in jumps. Small sizes are timed one by one.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 24, 32, 48, 64)
# Once a size costs this many times a plain step, larger sizes are not timed.
HOPELESS = 6.0
# For sizes up to this one, only the last of several steps is timed: after a pass of another size,
# the CPU caches hold other data.
REPEATED = 8
REPEATS = 3
WITHOUT = "no drafter"  # the stamp of step times without a drafter
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptTimes:
    """Holds step times in the timings file; `busy` has the same meaning as in KernelTimings."""

    verify: Curve
    draft: Curve
    busy: float | None = None


class NullDrafter(Drafter):
    """Drafts token 0 for every node; its steps cost as much as steps that draft only n-gram matches."""

    num_heads = 4

    def draft(
        self,
        backbone: Backbone,
        sequences: Sequence[Drafter],
        new: Sequence[NewTokens],
        tree: Tree | DynamicTree,
    ) -> list[Draft]:
        assert isinstance(tree, Tree)
        return [
            Draft(torch.zeros(tree.size, dtype=torch.long, device=backbone.device), tree)
            for _ in new
        ]


def measure_step_times(
    backbone: Backbone,
    drafter: Drafter,
    *,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    sizes: Sequence[int] = SIZES,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> StepTimes:
    """Measures step times by tree size, and draft times by number of levels, after `context` tokens.

    Returns the minimum over the rounds, because disturbances of the machine only add time. The
    tokens are arbitrary: step times do not depend on them.
    """
    heads = drafter.num_heads
    late = drafter.uses_verify_pass
    repeated = (REPEATS - 1) * sum(nodes <= REPEATED for nodes in sizes)
    steps = (1 + late) * (len(sizes) + repeated + heads)
    context = max(1, min(context, backbone.max_positions - (heads + 1) * (steps + 1)))
    prompt = (torch.arange(context) % backbone.vocab_size).tolist()
    decoder = Decoder(backbone, drafter)
    known = (
        len(getattr(drafter, "draft_ids", ())) or backbone.vocab_size
    )  # a head cannot make more guesses
    chains = {depth: policy_of(Tree.chain(depth)) for depth in range(1, heads + 1)}
    bushy = {nodes: policy_of(_bushy(nodes, heads)) for nodes in sizes if nodes <= known}
    verify: dict[int, float] = {}
    draft: dict[int, float] = {}

    def step(policy: DraftPolicy) -> Step:
        decoder.policy = policy
        if late:  # it drafts from extra rows of the previous verify pass
            decoder.step()
        on_progress(1)
        return decoder.step()[0][1]

    for number in range(rounds + 1):
        # The prompt is still cached from the previous round: only its last token is run again.
        sequence, _ = decoder.admit(Request(prompt, (heads + 1) * (steps + 1), stop_ids=()))
        for depth, policy in chains.items():
            seconds = step(policy).draft_s
            if number:  # the first round is a warm-up
                draft[depth] = min(seconds, draft.get(depth, seconds))
        for nodes, policy in list(bushy.items()):
            for _ in range(REPEATS - 1 if nodes <= REPEATED else 0):
                step(policy)
            seconds = step(policy).verify_s
            if number:
                verify[nodes] = min(seconds, verify.get(nodes, seconds))
                if nodes > 16 and seconds > HOPELESS * verify[1]:
                    bushy = {size: known for size, known in bushy.items() if size <= nodes}
                    break
        sequence.cancel()
    return StepTimes(verify, draft)


def step_times_for(
    backbone: Backbone,
    drafter: Drafter | None,
    stamp: str | None,
    *,
    again: bool = False,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> StepTimes:
    """Returns a drafter's step times on this machine, either from the timings file or measured now and stored.

    Without a drafter, they cover only the passes of the backbone. Times from a busy machine are
    measured again after an hour.
    """
    stamp = WITHOUT if drafter is None else stamp
    key = "|".join(
        (
            machine_key(backbone.config),
            device_name(backbone.device),
            backbone.engine.title,
            "graphs" if captures(backbone.engine) else "",
            str(backbone.dtype),
            *((rounding,) if (rounding := backbone.identity.get("rounding")) else ()),
            *((drafter.name, str(drafter.num_heads)) if drafter is not None else ()),
            stamp or "",
        )
    )
    kept = None if again or stamp is None else read_timings(key, KeptTimes)
    if kept is not None and not is_doubtful(kept.busy) and 1 in kept.verify and 1 in kept.draft:
        return StepTimes(kept.verify, kept.draft)
    log.info("timing decoding steps on this machine, once for this drafter")
    step_times, busy = watched(
        lambda: measure_step_times(backbone, drafter or NullDrafter(), on_progress=on_progress)
    )
    if stamp is not None:
        keep_timings(key, KeptTimes(step_times.verify, step_times.draft, busy))
    # A thread that waits for a GPU also looks disturbed.
    if busy is not None and backbone.device.type == "cpu":
        log.warning(
            "other programs took much of the processor while steps were timed, so the tree may be the wrong one; "
            "steps are timed again an hour from now"
        )
    return step_times


def _bushy(nodes: int, depth: int) -> Tree:
    """Returns a tree of `nodes` nodes: one path through all heads, and the other nodes directly below the root."""
    chain = [[0] * level for level in range(1, min(depth, nodes - 1) + 1)]
    return Tree.from_choices([*chain, *([rank] for rank in range(1, nodes - len(chain)))])
