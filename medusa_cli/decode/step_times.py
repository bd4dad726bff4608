"""Durations of whole decoding steps on this machine, measured once per drafter and backbone."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from medusa_cli.decode.answer import Step
from medusa_cli.decode.decoder import Decoder
from medusa_cli.decode.graph_trial import captures
from medusa_cli.decode.policy import DraftPolicy, policy_of
from medusa_cli.decode.sequence import Request
from medusa_cli.decode.sequence import Sequence as DecodedSequence
from medusa_cli.device import device_name, free_memory
from medusa_cli.drafters.base import Drafter, NewTokens
from medusa_cli.engine.timing import (
    Curve,
    is_doubtful,
    keep_timings,
    machine_key,
    random_tokens,
    read_timings,
    watched,
)
from medusa_cli.model import Backbone
from medusa_cli.progress import ShowProgress, show_nothing
from medusa_cli.tree import Draft, DynamicTree, Tree
from medusa_cli.tree.search import StepTimes

# Steps are timed after CONTEXT tokens, and after LONG_CONTEXT tokens, where attention takes a
# noticeable part of the time.
CONTEXT = 256
LONG_CONTEXT = 8192
ROUNDS = 4
LONG_ROUNDS = 2
# Matmuls run in blocks of rows, so the cost rises in jumps. Small sizes are timed one by one.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 24, 32, 48, 64)
# After a long text, the time of attention rises linearly with the size, so fewer sizes are timed.
LONG_SIZES = (1, 2, 4, 8, 16, 32)
# The cache of a long text may take this share of the free memory.
MEMORY_SHARE = 0.25
# The maximum length of a timed sequence's answer, in tokens.
ANSWER = 1024
# Once a step of some size takes this many times as long as a plain step, larger sizes are not timed.
HOPELESS = 6.0
# For sizes up to REPEATED, only the last of REPEATS steps is timed, because after a pass of another
# size, the CPU caches hold other data.
REPEATED = 8
REPEATS = 3
WITHOUT = "no drafter"  # the stamp of step times without a drafter
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptTimes:
    """Holds the step times in the timings file, after a short text and, if it was measured, after a long text.

    busy: when the times were measured, if other programs used much of the CPU meanwhile.
    """

    verify: Curve
    draft: Curve
    context: int
    busy: float | None = None
    longer: "KeptTimes | None" = None

    @classmethod
    def of(cls, times: StepTimes, busy: float | None = None) -> "KeptTimes":
        longer = None if times.longer is None else cls.of(times.longer)
        return cls(times.verify, times.draft, times.context, busy, longer)

    @property
    def times(self) -> StepTimes:
        longer = None if self.longer is None else self.longer.times
        return StepTimes(self.verify, self.draft, self.context, longer)

    @property
    def complete(self) -> bool:
        parts = [self] if self.longer is None else [self, self.longer]
        return all(1 in part.verify and 1 in part.draft for part in parts)


class NullDrafter(Drafter):
    """Drafts random tokens, so that its steps take as long as steps that draft only n-gram matches."""

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
            Draft(
                random_tokens(tree.size, backbone.vocab_size, tokens.end).to(backbone.device), tree
            )
            for tokens in new
        ]


class StepTimer:
    """Times the steps of one sequence. Near the end of the context, the sequence begins again."""

    def __init__(
        self, backbone: Backbone, drafter: Drafter, show: ShowProgress = show_nothing
    ) -> None:
        self.backbone = backbone
        self.drafter = drafter
        self.decoder = Decoder(backbone, drafter)
        self._show = show
        self._steps = 0
        # A drafter that uses the verify pass drafts from extra rows of the previous pass.
        self._passes = 2 if drafter.uses_verify_pass else 1
        # A step adds at most one token per head and the bonus token.
        self._room = self._passes * (drafter.num_heads + 1)
        self._context = 1
        self._sequence: DecodedSequence | None = None

    @property
    def longest(self) -> int:
        """Returns the largest number of tokens after which a step fits into the context."""
        return max(1, self.backbone.max_positions - self._room - 1)

    def measure(self, context: int, rounds: int, sizes: Sequence[int]) -> StepTimes:
        """Returns the times after `context` tokens: the minima over the rounds, as disturbances only add time."""
        self._context = context
        heads = self.drafter.num_heads
        # A head cannot make more guesses than its vocabulary has tokens.
        known = len(getattr(self.drafter, "draft_ids", ())) or self.backbone.vocab_size
        chains = {depth: policy_of(Tree.chain(depth)) for depth in range(1, heads + 1)}
        bushy = {nodes: policy_of(_bushy(nodes, heads)) for nodes in sizes if nodes <= known}
        verify: dict[int, float] = {}
        draft: dict[int, float] = {}
        for number in range(rounds + 1):
            self._begin()
            for depth, policy in chains.items():
                seconds = self._step(policy).draft_s
                if number:  # the first round is a warm-up
                    draft[depth] = min(seconds, draft.get(depth, seconds))
            for nodes, policy in list(bushy.items()):
                for _ in range(REPEATS - 1 if nodes <= REPEATED else 0):
                    self._step(policy)
                seconds = self._step(policy).verify_s
                if number:
                    verify[nodes] = min(seconds, verify.get(nodes, seconds))
                    if nodes > 16 and seconds > HOPELESS * verify[1]:
                        bushy = {size: known for size, known in bushy.items() if size <= nodes}
                        break
            self.close()
        return StepTimes(verify, draft, context)

    def close(self) -> None:
        """Ends the sequence."""
        if self._sequence is not None:
            self._sequence.cancel()
            self._sequence = None

    def _begin(self) -> None:
        """Begins a sequence of `context` tokens, of which at most CONTEXT are run."""
        self.close()
        prompt = min(self._context, CONTEXT, self.longest)
        tokens = random_tokens(prompt, self.backbone.vocab_size, 0).tolist()
        answer = self.backbone.max_positions - prompt
        # The prompt is still cached from the last sequence, so only the prompt's last token is run.
        self._sequence, _ = self.decoder.admit(Request(tokens, min(answer, ANSWER), stop_ids=()))
        if self._context > prompt:
            self.decoder.policy = policy_of(Tree.chain(1))
            self.decoder.step()  # the drafter reads the prompt
            self._lengthen(self._sequence, self._context)

    def _lengthen(self, sequence: DecodedSequence, length: int) -> None:
        """Extends a text with tokens that are not run, because the values of its rows do not change step times."""
        missing = length - len(sequence.tokens)
        self.decoder.cache.lengthen(0, length)
        sequence.tokens += [0] * missing
        sequence.unread = [replace(new, start=new.start + missing) for new in sequence.unread]

    def _step(self, policy: DraftPolicy) -> Step:
        """Takes a step, in a new sequence if the current sequence is too long."""
        sequence = self._sequence
        assert sequence is not None
        left = min(self.backbone.max_positions - len(sequence.tokens) - 1, sequence.stop.left)
        if left < self._room:
            self._begin()
        self.decoder.policy = policy
        for _ in range(self._passes - 1):
            self.decoder.step()
        self._steps += 1
        self._show("timing steps", self._steps, None, "steps")
        return self.decoder.step()[0][1]


def measure_step_times(
    backbone: Backbone,
    drafter: Drafter,
    *,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    sizes: Sequence[int] = SIZES,
    show: ShowProgress = show_nothing,
) -> StepTimes:
    """Measures step times by tree size, and draft times by number of levels, after `context` tokens.

    If the model and the memory allow, some sizes are also timed after LONG_CONTEXT tokens, most of
    which are not run: they only have rows in the caches.
    """
    timer = StepTimer(backbone, drafter, show)
    times = timer.measure(min(context, timer.longest), rounds, sizes)
    long = min(LONG_CONTEXT, timer.longest)
    limit = MEMORY_SHARE * free_memory(backbone.device)
    while long and timer.decoder.cache.grown(long + max(sizes)) * backbone.engine.row_bytes > limit:
        long //= 2
    # Graphs keep the rows of drafters' layers in separate slots.
    if long < 4 * times.context or timer.decoder.cuda_graphs is not None:
        return times
    known = [nodes for nodes in LONG_SIZES if nodes in times.verify]
    return replace(times, longer=timer.measure(long, min(rounds, LONG_ROUNDS), known))


def step_times_for(
    backbone: Backbone,
    drafter: Drafter | None,
    stamp: str | None,
    *,
    again: bool = False,
    show: ShowProgress = show_nothing,
) -> StepTimes:
    """Returns a drafter's step times on this machine, either from the timings file or measured now and stored.

    Without a drafter, the times cover only the backbone's passes. Times from a busy machine are
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
    if kept is not None and not is_doubtful(kept.busy) and kept.complete:
        return kept.times
    log.info("timing decoding steps on this machine, once for this drafter")
    step_times, busy = watched(
        lambda: measure_step_times(backbone, drafter or NullDrafter(), show=show)
    )
    if stamp is not None:
        keep_timings(key, KeptTimes.of(step_times, busy))
    # A thread that waits for a GPU looks as if other programs disturbed it, so the warning is only for CPUs.
    if busy is not None and backbone.device.type == "cpu":
        log.warning(
            "other programs used much of the processor while steps were timed, so the tree may not be the best; "
            "steps are timed again after an hour"
        )
    return step_times


def _bushy(nodes: int, depth: int) -> Tree:
    """Returns a tree of `nodes` nodes: one path through all heads, and the other nodes directly below the root."""
    chain = [[0] * level for level in range(1, min(depth, nodes - 1) + 1)]
    return Tree.from_choices([*chain, *([rank] for rank in range(1, nodes - len(chain)))])
