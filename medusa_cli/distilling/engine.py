"""Continuous batched generation: every slot of the batch holds one conversation and takes the next when it is done."""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa_cli.backbone import Backbone
from medusa_cli.backbone.dialogue import Malformed, after_answer, render
from medusa_cli.distilling.seeds import Seed
from medusa_cli.distilling.selftalk import user_turn
from medusa_cli.engines import Cache, Plan
from medusa_cli.errors import UsageError

# Seeds are sorted by length within windows of this many batches: neighbours in the batch then have like lengths
# (attention runs to the longest), while the order of the whole stays mixed.
WINDOW = 8
# A user's turn that is longer is no question any more.
QUESTION_TOKENS = 128


@dataclass(frozen=True)
class Settings:
    """How to generate: tokens an answer, turns a conversation, temperature (0 is greedy), slots, positions a slot.

    self_talk: the model writes the user's turns too, all but the first.
    """

    max_new_tokens: int = 256
    max_turns: int = 2
    temperature: float = 0.0
    random_seed: int = 0
    batch_size: int = 64
    capacity: int = 1024
    self_talk: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (
            ("@max_new_tokens", self.max_new_tokens, 1),
            ("@max_turns", self.max_turns, 1),
            ("@temperature", self.temperature, 0.0),
            ("@batch_size", self.batch_size, 1),
        ):
            if value < least:
                raise UsageError(f"{name} {value} is too small", f"use {least} or more")
        if self.max_new_tokens >= self.capacity:
            raise UsageError(
                f"@max_new_tokens {self.max_new_tokens} leaves no room for a prompt in @context {self.capacity}",
                "lower @max_new_tokens or raise @context",
            )


@dataclass
class Distilled:
    """One finished conversation: messages, its token ids, the assistant spans [start, end), the state at each position.

    A server's answers come without states. Files of earlier versions keep those alone that emitted the answers' tokens.
    """

    id: str
    messages: list[dict[str, str]]
    tokens: list[int]
    spans: list[tuple[int, int]]
    states: Tensor  # [len(tokens) - 1, H]; row p is the state at position p, which says token p + 1


@dataclass
class _Slot:
    """A conversation under way in one slot of the batch."""

    seed: Seed
    messages: list[dict[str, str]]
    generator: random.Random
    tokens: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    answer_start: int = 0
    turns_asked: int = 1
    asking_from: int | None = None  # tokens there were when the model began to write the user's turn


def order(seeds: list[Seed], settings: Settings, max_samples: int | None = None) -> list[Seed]:
    """Shuffle by the random seed, take max_samples, and sort by length within windows; the same for every resume."""
    mixed = list(seeds)
    random.Random(settings.random_seed).shuffle(mixed)
    mixed = mixed[:max_samples]
    size = WINDOW * settings.batch_size
    windows = [mixed[i : i + size] for i in range(0, len(mixed), size)]
    return [seed for window in windows for seed in sorted(window, key=lambda s: len("".join(s.turns)))]


def distill(
    backbone: Backbone,
    seeds: list[Seed],
    settings: Settings,
    *,
    on_tokens: Callable[[int], None] = lambda count: None,
    on_skip: Callable[[Seed], None] = lambda seed: None,
    on_refusal: Callable[[Seed, str], None] = lambda seed, reason: None,
) -> Iterator[Distilled]:
    """Let the backbone answer every seed's turns one after another, yielding conversations as they finish.

    on_tokens is told how many answer tokens each step made; on_skip which seeds are too long for a slot; on_refusal
    which ones the chat template does not take, and why.
    """
    waiting = iter(seeds)
    capacity = min(settings.capacity, backbone.max_positions)
    cache = backbone.engine.new_cache(settings.batch_size)
    states = torch.zeros(settings.batch_size, capacity, backbone.hidden_size, dtype=torch.bfloat16)
    slots: list[_Slot | None] = [None] * settings.batch_size
    work = _Batch(backbone, settings, cache, capacity, states)
    while True:
        for index in range(settings.batch_size):
            # A conversation may end with an answer's very first token, so a slot may take several seeds in a row.
            while (slot := slots[index]) is None or work.answer_ended(slot):
                if slot is None:
                    seed = next(waiting, None)
                    if seed is None:
                        break
                    try:
                        slots[index] = work.begin(index, seed)
                    except Malformed as reason:
                        on_refusal(seed, str(reason))
                        continue
                    if slots[index] is None:
                        on_skip(seed)
                elif not work.next_turn(index, slot):
                    yield work.finished(index, slot)
                    slots[index] = None
        live = [(index, slot) for index, slot in enumerate(slots) if slot is not None]
        if not live:
            return
        work.step(live)
        on_tokens(len(live))


class _Batch:
    """The forward passes over the slots and the book-keeping of one conversation each."""

    def __init__(self, backbone: Backbone, settings: Settings, cache: Cache, capacity: int, states: Tensor) -> None:
        self.backbone, self.settings, self.cache, self.states = backbone, settings, cache, states
        self.capacity = capacity

    def begin(self, index: int, seed: Seed) -> _Slot | None:
        """Prefill a fresh conversation into a slot; None if its first prompt leaves no room for an answer.

        Malformed where the chat template does not take it.
        """
        system = [{"role": "system", "content": seed.system}] if seed.system else []
        messages = [*system, {"role": "user", "content": seed.turns[0]}]
        # Far too long prompts are not worth tokenising; a token is rarely more than eight characters.
        if len(seed.turns[0]) > 8 * self.capacity:
            return None
        prompt = self._encode(render(self.backbone, messages, prompt=True))
        if len(prompt) + self.settings.max_new_tokens > self.capacity:
            return None
        digest = hashlib.sha256(f"{self.settings.random_seed}:{seed.id}".encode()).digest()
        slot = _Slot(seed, messages, random.Random(digest))
        self.cache.truncate(index, 0)
        self._ask(index, slot, prompt)
        return slot

    def _ask(self, index: int, slot: _Slot, prompt: list[int], in_cache: int = 0) -> None:
        """Feed prompt tokens to the slot and take the answer's first token; in_cache of them are in tokens already."""
        out = self.backbone.engine.forward(Plan.chain(prompt, slot=index), self.cache)
        slot.tokens += prompt[in_cache:]
        slot.answer_start = len(slot.tokens)
        assert out.logits is not None
        first = len(slot.tokens) - len(prompt)
        self.states[index, first : first + len(prompt)] = out.hidden[0].to(self.states)
        self._emit([(index, slot)], out.logits[:, -1])

    def step(self, live: list[tuple[int, _Slot]]) -> None:
        """One token for every live conversation."""
        tokens = torch.zeros(self.cache.slots, 1, dtype=torch.long)
        for index, slot in live:
            tokens[index] = slot.tokens[-1]
        alive = {index for index, _ in live}
        for index in range(self.cache.slots):
            if index not in alive:
                self.cache.truncate(index, 0)
        out = self.backbone.engine.forward(Plan(tokens), self.cache)
        assert out.logits is not None
        rows = torch.tensor(sorted(alive), device=out.hidden.device)
        logits, hidden = out.logits[:, 0], out.hidden[:, 0]
        if len(live) < len(tokens):
            logits, hidden = logits[rows], hidden[rows]
        places = torch.tensor([len(slot.tokens) - 1 for _, slot in live])
        self.states[torch.tensor([index for index, _ in live]), places] = hidden.to(self.states)
        self._emit(live, logits)

    def _emit(self, live: list[tuple[int, _Slot]], logits: Tensor) -> None:
        for (_, slot), token in zip(live, self._choose(live, logits), strict=True):
            slot.tokens.append(token)

    def _choose(self, live: list[tuple[int, _Slot]], logits: Tensor) -> list[int]:
        """Greedy tokens, or one draw a row by inverting its distribution at that conversation's own random number."""
        if self.settings.temperature == 0:
            return logits.float().argmax(-1).tolist()  # argmax over bf16 is several times slower
        cumulated = (logits.float() / self.settings.temperature).softmax(-1).cumsum(-1)
        draws = torch.tensor([[slot.generator.random()] for _, slot in live], device=logits.device)
        chosen = torch.searchsorted(cumulated, draws * cumulated[:, -1:], right=True)
        return chosen[:, 0].clamp(max=logits.shape[-1] - 1).tolist()

    def answer_ended(self, slot: _Slot) -> bool:
        count = len(slot.tokens) - slot.answer_start
        most = self.settings.max_new_tokens if slot.asking_from is None else QUESTION_TOKENS
        return slot.tokens[-1] in self.backbone.eos_ids or count >= most

    def next_turn(self, index: int, slot: _Slot) -> bool:
        """Close the turn just written; ask the next question if there is one and room for its answer."""
        if slot.asking_from is not None:
            question = self._question(index, slot, slot.asking_from)
            return bool(question) and self._put(index, slot, question)
        slot.spans.append((slot.answer_start, len(slot.tokens)))
        answer = self.backbone.decode(slot.tokens[slot.answer_start :])
        slot.messages.append({"role": "assistant", "content": answer})
        if self.settings.self_talk:
            return slot.turns_asked < self.settings.max_turns and self._let_ask(index, slot)
        if slot.turns_asked >= min(self.settings.max_turns, len(slot.seed.turns)):
            return False
        return self._put(index, slot, slot.seed.turns[slot.turns_asked])

    def _put(self, index: int, slot: _Slot, text: str) -> bool:
        """Ask this next; False where the template or the slot has no room for it."""
        question = {"role": "user", "content": text}
        try:
            bridge = after_answer(self.backbone, [*slot.messages, question], prompt=True)
        except Malformed:
            return False
        if bridge is None or not self._go_on(index, slot, self._encode(bridge), self.settings.max_new_tokens):
            return False
        slot.messages.append(question)
        slot.turns_asked += 1
        return True

    def _let_ask(self, index: int, slot: _Slot) -> bool:
        """Let the model write the user's next turn, after the template's header of one."""
        header = user_turn(self.backbone, slot.messages)
        if header is None:
            return False
        slot.asking_from = len(slot.tokens)
        if self._go_on(index, slot, header, QUESTION_TOKENS + self.settings.max_new_tokens):
            return True
        slot.asking_from = None
        return False

    def _question(self, index: int, slot: _Slot, start: int) -> str:
        """What the model asked, "" where it found no end; the slot goes back to before, for the template to say it."""
        ended = slot.tokens[-1] in self.backbone.eos_ids
        text = self.backbone.decode(slot.tokens[slot.answer_start :]).strip()
        del slot.tokens[start:]
        self.cache.truncate(index, start - 1)  # the answer's last token has not been run
        slot.asking_from = None
        return text if ended else ""

    def _go_on(self, index: int, slot: _Slot, bridge: list[int], room: int) -> bool:
        """Feed a bridge from the answer to what follows; False unless `room` more tokens fit after it."""
        if bridge[:1] == slot.tokens[-1:]:  # the answer's own end token opens the bridge
            bridge = bridge[1:]
        if len(slot.tokens) + len(bridge) + room > self.capacity:
            return False
        # The answer's last token has been decided but not yet run.
        self._ask(index, slot, [slot.tokens[-1], *bridge], in_cache=1)
        return True

    def _encode(self, text: str) -> list[int]:
        """Token ids of a text that the template made."""
        return list(self.backbone.tokenizer.encode(text, add_special_tokens=False))

    def finished(self, index: int, slot: _Slot) -> Distilled:
        rows = self.states[index, : len(slot.tokens) - 1].clone()
        return Distilled(slot.seed.id, slot.messages, slot.tokens, slot.spans, rows)
