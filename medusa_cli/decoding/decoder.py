"""The decoder: B sequences side by side, and the one step that all decoding is made of: draft, verify, accept, keep."""

from collections.abc import Iterable
from collections.abc import Sequence as Several

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.decoding.accept import accept
from medusa_cli.decoding.captured import Captured
from medusa_cli.decoding.clock import Clock
from medusa_cli.decoding.ending import Ending, fitting
from medusa_cli.decoding.lookup import Asked, Lookup, graft
from medusa_cli.decoding.luck import Fortune
from medusa_cli.decoding.pace import Pace
from medusa_cli.decoding.sampling import Rule, Sampling
from medusa_cli.decoding.sequence import Sequence
from medusa_cli.decoding.slots import Held, Slots
from medusa_cli.decoding.trial import captures
from medusa_cli.decoding.types import Settled, Step
from medusa_cli.drafters.base import Confirmed, Draft, Drafter
from medusa_cli.engines import Engine, Plan, Pseudo
from medusa_cli.tree import Growth, Tree
from medusa_cli.tree.forest import side_by_side

ROOT = Tree.root_only()


def captured_over(engine: Engine, shape: "Tree | Growth | Pace") -> bool:
    """Whether steps over a shape are captured: where a trial says so, but for trees that grow, each of which is new."""
    return not isinstance(shape, Growth) and captures(engine)


def looks_up(drafter: Drafter | None, captured: bool) -> bool:
    """Whether anything is looked up beside a drafter's guesses: captured steps are of a few fixed trees, and rows that
    ride make every node dear."""
    return not captured and not (drafter is not None and drafter.rides)


class Decoder:
    """Sequences under way in the slots of one cache; `step` brings each of them on.

    shape is what every step drafts: a static tree, a growth of dynamic ones, a Pace that chooses among trees of several
    sizes, or a Lookup that sets what the text itself suggests beside any of these. Without it, or a drafter for it,
    steps are plain: the tree of the root alone. Greedy and exact sampling give what plain decoding gives: the same
    tokens, the same distribution. A slot outlives its sequence: a prompt that begins alike runs only what is new.
    """

    def __init__(
        self,
        backbone: Backbone,
        drafter: Drafter | None = None,
        shape: "Tree | Growth | Pace | Lookup | None" = None,
        *,
        slots: int = 1,
        captured: bool | None = None,
        taps: tuple[int, ...] = (-1,),
    ) -> None:
        """captured: run steps of fixed shapes, as CUDA graphs where there is CUDA; None: where a trial says so.

        taps: of which layers the states are told, where no drafter names its own.
        """
        self.backbone, self.engine, self.drafter = backbone, backbone.engine, drafter
        over = shape.over if isinstance(shape, Lookup) else shape
        self.shape: Tree | Growth | Pace = over if over is not None and (drafter or not over.max_depth) else ROOT
        self.taps = taps if drafter is None else drafter.taps
        # Steps of one row read keys as they come, several rows transposed ones.
        self.slots = Slots(self.engine.new_cache(slots, plain=drafter is None and not isinstance(shape, Lookup)))
        self._places: list[Sequence | None] = []  # by slot; one that was left takes the next prompt or is closed up
        fixed = captured_over(self.engine, self.shape) if captured is None else captured
        self.captured = Captured(self.engine, self.slots.cache, self.taps) if fixed else None
        self._rides = drafter is not None and drafter.rides
        self.lookup = shape if isinstance(shape, Lookup) and looks_up(drafter, fixed) else None
        self._next: Tree | Growth = self._choose()

    @property
    def rows(self) -> list[Sequence]:
        """The sequences under way."""
        return [one for one in self._places if one is not None]

    @property
    def room(self) -> int:
        """How many more sequences can be admitted."""
        return self.slots.count - len(self.rows)

    def draft_over(self, shape: Tree | Growth) -> None:
        """Let steps from the next one on draft this; where drafts ride in the pass before, from the one after it."""
        self.shape = shape
        if not self._rides:
            self._next = shape

    @torch.inference_mode()
    def admit(
        self,
        prompt: Several[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        number: int = 0,
        stop_ids: Iterable[int] | None = None,
        stop_strings: Several[str] = (),
        top: int | None = None,
        reuse: int | None = None,
    ) -> tuple[Sequence, Step]:
        """Take a prompt of token ids in: its prefill, and the answer's first token. `number` sets its draws apart.

        top asks for the tokens' log probabilities, and those of so many of the likeliest beside each. reuse: of how
        many of its first tokens an earlier text's rows may serve; None: of all.

        Raises UserError for a prompt longer than the context, UsageError for limits that cannot be.
        """
        ending = Ending(self.backbone, prompt, max_new_tokens, stop_ids, stop_strings)
        sampling = sampling or Sampling()
        clock, rule = Clock(self.backbone), Rule(sampling, number)
        fortune = self.shape.begin(sampling) if isinstance(self.shape, Pace) else None
        if not self.rows:  # with others under way, what rides in their passes is of the depth that was chosen before
            self._next = self._choose(fortune)
        slot, kept = self._place(prompt, reuse)
        tokens = torch.tensor(list(prompt[kept.length :]), device=self.backbone.device)
        plan = Plan.chain(tokens, slot=slot, taps=self.taps, pseudo=self._pseudo())
        out = self.engine.forward(plan, self.slots.cache)
        root = rule.choose(out.logits[0, -1])
        confirmed = Confirmed(tokens, out.hidden[0], root, kept.length, None if out.ahead is None else out.ahead[0, -1])
        if kept.drafter is not None:
            confirmed = kept.drafter.opening(confirmed)
        past = None if self.lookup is None else self.lookup.begin(sampling)
        known = (top, kept.length, fortune, past)
        sequence = Sequence(number, list(prompt), ending, rule, kept.drafter, [*kept.unseen, confirmed], *known)
        self._places[slot : slot + 1] = [sequence]
        likely = sequence.likelihoods(out.logits[0, -1:], [root])
        step = Step(ending.cut([root]), 0, 0, 0.0, clock.lap(), prefill=True, likelihoods=likely)
        self._leave()
        return sequence, step

    @torch.inference_mode()
    def step(self, drafts: list[Draft] | None = None) -> list[tuple[Sequence, Step]]:
        """Draft, verify, accept and keep for every sequence; what each gained. Those that end leave.

        A step's seconds are each sequence's share of the pass over all. drafts: one for each, made elsewhere.
        """
        self._close_up()
        rows, cache, clock = self.rows, self.slots.cache, Clock(self.backbone)
        if not rows:
            return []
        drafts = drafts or self._draft(self._next)
        draft_s = clock.lap() / len(rows)
        if self._rides:
            self._next = self._choose()

        starts = cache.lengths[: len(rows)]
        verdicts = self._verify(drafts)
        gained, likely = [], []
        for sequence, draft, verdict, start in zip(rows, drafts, verdicts, starts, strict=True):
            tokens = draft.tokens[torch.tensor(verdict.path, device=draft.tokens.device)]
            sequence.settle(Confirmed(tokens, verdict.hidden, verdict.bonus, start, verdict.ahead))
            fresh = [*tokens[1:].tolist(), verdict.bonus]
            if self.lookup is not None and sequence.past is not None:
                self.lookup.learn(sequence.past, sequence.rule.sampling, fresh)
            gained.append(sequence.ending.cut(fresh))
            likely.append(() if verdict.logits is None else sequence.likelihoods(verdict.logits, gained[-1]))
        verify_s = clock.lap() / len(rows)
        steps = [
            Step(
                fresh,
                draft.tree.size - 1,
                len(fresh) - 1,
                draft_s,
                verify_s,
                False,
                tuple(v.path),
                draft.tree.size,
                top,
                draft.looked_up,
            )
            for fresh, draft, v, top in zip(gained, drafts, verdicts, likely, strict=True)
        ]
        if isinstance(self.shape, Pace):
            self.shape.record(steps, self._fortunes())
        if not self._rides:
            self._next = self._choose()
        found = list(zip(rows, steps, strict=True))
        self._leave()
        return found

    def _verify(self, drafts: list[Draft]) -> list[Settled]:
        """One pass over all drafts: which path of each stands. Their rows, and no others, are kept in the cache."""
        tokens, depth, sees = side_by_side([draft.tokens for draft in drafts], [draft.tree for draft in drafts])
        rules, pseudo = [sequence.rule for sequence in self.rows], self._pseudo()
        asked = [sequence.top is not None for sequence in self.rows]
        if self.captured is not None and not any(asked) and self.captured.can(drafts, rules, pseudo):
            return self.captured.verify(tokens, drafts[0].tree, rules)
        out = self.engine.forward(Plan(tokens, depth, sees, 0, self.taps, "all", pseudo), self.slots.cache)
        settled = []
        for slot, verdict in enumerate(accept(out.logits, drafts, rules)):
            self.slots.cache.keep(slot, verdict.path)
            path = torch.tensor(verdict.path, device=tokens.device)
            ahead = None if out.ahead is None else out.ahead[slot, verdict.path[-1]]
            logits = out.logits[slot, path] if asked[slot] else None
            settled.append(Settled(verdict.path, verdict.bonus, out.hidden[slot, path], ahead, logits))
        return settled

    def _pseudo(self) -> Pseudo | None:
        """The rows that ride in a pass for the drafts of the step after it."""
        return None if self.drafter is None else self.drafter.pseudo(self._next.max_depth)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence before its end; its slot is free for the next prompt at once."""
        sequence.cancelled = True
        self._leave()

    def forget(self) -> None:
        """Keep nothing of earlier texts for the prompts to come."""
        self.slots.forget()

    def _choose(self, *beginning: Fortune | None) -> Tree | Growth:
        """What the next step drafts, for a text that begins beside those under way."""
        if not isinstance(self.shape, Pace):
            return self.shape
        return self.shape.choose([*self._fortunes(), *(one for one in beginning if one is not None)])

    def _fortunes(self) -> list[Fortune]:
        return [sequence.fortune for sequence in self.rows if sequence.fortune is not None]

    def _draft(self, shape: Tree | Growth) -> list[Draft]:
        """A draft for every sequence; near its context's end a sequence has a tree of its own, cut to what fits."""
        rows, found = self.rows, list[Draft | None]([None] * len(self.rows))
        rooms = [self.backbone.max_positions - length for length in self.slots.cache.lengths[: len(rows)]]
        asked = self._asked(shape)
        cut = [fitting(one, room) for (one, _), room in zip(asked, rooms, strict=True)]
        for one in dict.fromkeys(cut):
            mine = [index for index in range(len(rows)) if cut[index] == one]
            for index, draft in zip(mine, self._draft_alike(mine, one), strict=True):
                found[index] = graft(draft, [path[: rooms[index] - 1] for path in asked[index][1]])
        return [draft for draft in found if draft is not None]

    def _asked(self, shape: Tree | Growth) -> list[Asked]:
        """For each sequence what its drafter is asked for, and the paths that its own text suggests beside that."""
        if self.lookup is None:
            return [(shape, []) for _ in self.rows]
        texts = [(one.past, one.tokens, one.root) for one in self.rows if one.past is not None]
        return self.lookup.beside(shape, texts)

    def _draft_alike(self, mine: list[int], shape: Tree | Growth) -> list[Draft]:
        """Drafts of one shape for some of the sequences; a root alone needs no drafter."""
        rows = [self.rows[index] for index in mine]
        states = [sequence.drafter for sequence in rows if sequence.drafter is not None]
        if self.drafter is None or not shape.max_depth:
            roots = torch.tensor([one.root for one in rows], device=self.backbone.device)
            return [Draft(root, ROOT) for root in roots.split(1)]
        drafts = self.drafter.draft(self.backbone, states, [one.confirmed for one in rows], shape)
        for sequence in rows:
            sequence.seen = True
        return drafts

    def _place(self, prompt: Several[int], reuse: int | None) -> tuple[int, Held]:
        """A slot for a prompt, among those left or right behind the others, and what it holds of the prompt."""
        taken = {slot for slot, one in enumerate(self._places) if one is not None}
        idle = [slot for slot in range(self.slots.count) if slot not in taken]
        slot, kept = self.slots.take(idle, prompt, self.drafter, reuse)
        if slot > len(self._places):
            self.slots.swap(slot, len(self._places))
            slot = len(self._places)
        return slot, kept

    def _leave(self) -> None:
        """Let sequences that are done go; what their slots hold is remembered."""
        for slot, sequence in enumerate(self._places):
            if sequence is not None and sequence.done:
                self.slots.release(slot, sequence.tokens, sequence.drafter, sequence.unseen)
                if isinstance(self.shape, Pace):
                    self.shape.end()
                self._places[slot] = None

    def _close_up(self) -> None:
        """Move the last sequences up into the places that were left: a pass runs over the first slots."""
        while None in self._places:
            last = self._places.pop()
            if last is not None:
                hole = self._places.index(None)
                self.slots.swap(hole, len(self._places))
                self._places[hole] = last
