"""Conversations with the model here, side by side in one decoder: a turn is a prompt that goes on in its own slot."""

from collections.abc import Callable, Iterator

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.backbone.dialogue import after_answer, render, token_ids
from medusa_cli.decoding import Decoder, Sampling
from medusa_cli.distilling.distilled import Distilled, Settings
from medusa_cli.distilling.seeds import Seed
from medusa_cli.distilling.selftalk import QUESTION_TOKENS, user_turn
from medusa_cli.drafters.base import beside_final
from medusa_cli.runs.usable import Malformed


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

    on_tokens is told how many answer tokens each prompt and each step made; on_skip which seeds are too long for a
    slot; on_refusal which ones the chat template does not take, and why.
    """
    waiting = iter(seeds)
    decoder = Decoder(backbone, slots=settings.batch_size, taps=beside_final(settings.taps))
    talks: list[_Conversation | None] = [None] * settings.batch_size
    while True:
        for index in range(settings.batch_size):
            # A conversation may end with an answer's very first token, so several seeds may have their turn here.
            while (talk := talks[index]) is None or talk.turn.done:
                if talk is not None:
                    if talk.next_turn():
                        on_tokens(talk.answered)
                    else:
                        yield talk.finished()
                        talks[index] = None
                    continue
                seed = next(waiting, None)
                if seed is None:
                    break
                talk = _Conversation(seed, decoder, settings)
                try:
                    if talk.begin():
                        talks[index] = talk
                        on_tokens(talk.answered)
                    else:
                        on_skip(seed)
                except Malformed as reason:
                    on_refusal(seed, str(reason))
        steps = decoder.step()
        if not steps:
            return
        states = torch.cat([turn.confirmed.hidden for turn, _ in steps]).to("cpu", torch.bfloat16)
        running = {talk.turn: talk for talk in talks if talk is not None}
        for (turn, step), state in zip(steps, states, strict=True):
            running[turn].tokens += step.tokens
            running[turn].states[turn.confirmed.start] = state
        on_tokens(sum(len(step.tokens) for turn, step in steps if running[turn].answered))


class _Conversation:
    """A conversation under way: its messages, its tokens so far, and the states at all but the last of them."""

    def __init__(self, seed: Seed, decoder: Decoder, settings: Settings) -> None:
        self.seed, self.decoder, self.settings, self.backbone = seed, decoder, settings, decoder.backbone
        self.capacity = min(settings.capacity, self.backbone.max_positions)
        self.messages = [{"role": "system", "content": seed.system}] if seed.system else []
        self.tokens: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self.states = torch.empty(0)
        self._answer_start = self._asked = self._turns = 0
        self._asking_from: int | None = None  # tokens there were when the model began to write the user's turn

    def begin(self) -> bool:
        """Ask the first question; False if its prompt leaves no room, Malformed where the template does not take it."""
        # Far too long prompts are not worth tokenising; a token is rarely more than eight characters.
        if len(self.seed.turns[0]) > 8 * self.capacity:
            return False
        self.messages.append({"role": "user", "content": self.seed.turns[0]})
        prompt = token_ids(self.backbone, render(self.backbone, self.messages, prompt=True))
        self._asked = 1
        return self._go_on(prompt, self.settings.max_new_tokens)

    def next_turn(self) -> bool:
        """Close the turn just written; ask the next question if there is one and room for its answer."""
        if self._asking_from is not None:
            question = self._question(self._asking_from)
            return bool(question) and self._put(question)
        self.spans.append((self._answer_start, len(self.tokens)))
        answer = self.backbone.decode(self.tokens[self._answer_start :])
        self.messages.append({"role": "assistant", "content": answer})
        if self.settings.self_talk:
            return self._asked < self.settings.max_turns and self._let_ask()
        if self._asked >= min(self.settings.max_turns, len(self.seed.turns)):
            return False
        return self._put(self.seed.turns[self._asked])

    @property
    def answered(self) -> int:
        """Tokens of the answer under way; none while the model writes the user's turn."""
        return len(self.tokens) - self._answer_start if self._asking_from is None else 0

    def finished(self) -> Distilled:
        return Distilled(self.seed.id, self.messages, self.tokens, self.spans, self.states[: len(self.tokens) - 1])

    def _put(self, text: str) -> bool:
        """Ask this next; False where the template or the slot has no room for it."""
        question = {"role": "user", "content": text}
        try:
            bridge = after_answer(self.backbone, [*self.messages, question], prompt=True)
        except Malformed:
            return False
        if bridge is None or not self._go_on(token_ids(self.backbone, bridge), self.settings.max_new_tokens):
            return False
        self.messages.append(question)
        self._asked += 1
        return True

    def _let_ask(self) -> bool:
        """Let the model write the user's next turn, after the template's header of one."""
        header, end = user_turn(self.backbone, self.messages), len(self.tokens)
        if header is None or not self._go_on(header, QUESTION_TOKENS, left=self.settings.max_new_tokens):
            return False
        self._asking_from = end
        return True

    def _question(self, start: int) -> str:
        """What the model asked, "" where it found no end; the tokens go back to before, for the template to say it."""
        ended = self.tokens[-1] in self.backbone.eos_ids
        text = self.backbone.decode(self.tokens[self._answer_start :]).strip()
        del self.tokens[start:]
        self._asking_from = None
        return text if ended else ""

    def _go_on(self, more: list[int], limit: int, left: int = 0) -> bool:
        """Let the model say up to `limit` tokens after these; False unless they and `left` more fit after it."""
        if more[:1] == self.tokens[-1:]:  # the answer's own end token opens the bridge
            more = more[1:]
        if len(self.tokens) + len(more) + limit + left > self.capacity:
            return False
        # Of an answer the last token has been decided but not yet run. Rows of no other text serve: this one's states
        # are kept as they come.
        known = max(0, len(self.tokens) - 1)
        prompt = [*self.tokens, *more]
        sampling = Sampling.by_name(self.settings.temperature, f"{self.settings.random_seed}:{self.seed.id}")
        self.turn, first = self.decoder.admit(
            prompt, max_new_tokens=limit, sampling=sampling, number=self._turns, reuse=known
        )
        self._turns += 1
        if not known:
            width = self.backbone.hidden_size * len(self.decoder.taps)
            self.states = torch.empty(self.capacity, width, dtype=torch.bfloat16)
        start = self.turn.confirmed.start
        self.states[start : len(prompt)] = self.turn.confirmed.hidden
        self.tokens, self._answer_start = prompt + first.tokens, len(prompt)
        return True
