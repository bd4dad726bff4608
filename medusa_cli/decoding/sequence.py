"""One sequence under way: where it ends, how it chooses, its share of the drafter's state, what was settled last."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field

from torch import Tensor

from medusa_cli.decoding.ending import Ending
from medusa_cli.decoding.likelihood import Likelihood, likelihoods
from medusa_cli.decoding.luck import Fortune
from medusa_cli.decoding.past import Past
from medusa_cli.decoding.sampling import Rule
from medusa_cli.drafters.base import Confirmed, Drafter, joined


@dataclass(eq=False)
class Sequence:
    """A prompt and its answer so far, in one slot of the cache.

    tokens are those in the slot; `confirmed` holds what the drafter has not seen yet, its root not in the slot. top:
    how many of the likeliest tokens each step names beside its own, None for no likelihoods at all. reused: the tokens
    of the prompt that its slot held already. fortune: how its drafts fare, and past: what it said before, where the
    decoder goes by that.
    """

    number: int
    tokens: list[int]
    ending: Ending
    rule: Rule
    drafter: Drafter | None
    unseen: list[Confirmed]
    top: int | None = None
    reused: int = 0
    fortune: Fortune | None = None
    past: Past | None = None
    cancelled: bool = False
    seen: bool = field(default=False)

    @property
    def root(self) -> int:
        """The next token, decided but not yet in the slot."""
        return self.unseen[-1].root

    @property
    def confirmed(self) -> Confirmed:
        """What the drafter has not seen yet, in one piece: joined when it is asked for, not at every plain step."""
        if len(self.unseen) > 1:
            self.unseen = [joined(self.unseen)]
        return self.unseen[0]

    @property
    def done(self) -> bool:
        return self.ending.done or self.cancelled

    def likelihoods(self, logits: Tensor, tokens: Several[int]) -> tuple[Likelihood, ...]:
        """Those of new tokens by the logits [n, V] they came from, where they were asked for."""
        return () if self.top is None else likelihoods(logits, tokens, self.top)

    def settle(self, fresh: Confirmed) -> None:
        """Take what a step has settled; a drafter that was not asked in between finds it all together."""
        self.tokens += fresh.tokens.tolist()
        if self.seen or self.drafter is None:
            self.unseen, self.seen = [], False
        self.unseen.append(fresh)
