"""Answers from a model on this machine, many conversations at a time, with the hidden states of every position."""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from medusa_cli.data.conversation import Conversation
from medusa_cli.decode import Decoder, Request, Sampling
from medusa_cli.distill.records import Answered, Failed, Outcome, TooLong
from medusa_cli.drafters.base import with_last_layer
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import after_answer, render, token_ids
from medusa_cli.model.load import free_memory
from medusa_cli.runs.io import Malformed
from medusa_cli.runs.recipe import DistillRecipe

# More rows than this gain little on a GPU and nothing on a CPU, and a batch's last answers keep fewer of them busy.
MAX_BATCH = 64
# Share of the free memory that caches and states may take: the passes need some too.
MEMORY_SHARE = 0.7
# A token is rarely more than so many characters: a prompt that is longer by them is not worth tokenising.
TOKEN_CHARACTERS = 8
log = logging.getLogger(__name__)


def max_batch_size(config: Any, dtype: torch.dtype, context: int, free: int, *, states: int) -> int:
    """Returns how many conversations of `context` positions fit into `free` bytes, from 1 to MAX_BATCH.

    config: the model's text config. Each conversation has keys and values of every layer, and the hidden states of
    `states` layers that lie in the same memory.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = 2 * config.num_hidden_layers * heads * width + config.hidden_size * states
    return max(1, min(MAX_BATCH, int(MEMORY_SHARE * free) // (numbers * dtype.itemsize * context)))


def choose_batch_size(backbone: Backbone, settings: DistillRecipe, processes: int) -> int:
    """Returns how many conversations the memory free now holds; logs it where they are fewer than usual."""
    shared = backbone.device.type != "cuda"  # by the processes of this machine, and with the states
    free = free_memory(backbone.device) // (int(os.environ.get("LOCAL_WORLD_SIZE", processes)) if shared else 1)
    context = min(settings.context, backbone.max_positions)
    states = len(settings.taps) + 1 if shared else 0
    count = max_batch_size(backbone.config, backbone.dtype, context, free, states=states)
    if count < MAX_BATCH:
        log.info(
            f"{count} conversations at a time: {free / 1e9:.1f} GB are free for their {context:,} positions each; "
            "@batch_size N takes others"
        )
    return count


def answer_locally(backbone: Backbone, seeds: Sequence[Conversation], settings: DistillRecipe) -> Iterator[Outcome]:
    """Lets the backbone answer every seed's turns one after another; yields what became of each as it ends."""
    waiting = iter(seeds)
    slots: list[_Dialog | None] = [None] * (settings.batch_size or MAX_BATCH)
    decoder = Decoder(backbone, slots=len(slots), taps=with_last_layer(settings.taps))
    while True:
        for index in range(len(slots)):
            # A conversation may end with an answer's very first token, so several seeds may take a slot here.
            while (dialog := slots[index]) is None or dialog.sequence.done:
                if dialog is not None:
                    if not dialog.next_turn():
                        yield dialog.answered()
                        slots[index] = None
                    continue
                seed = next(waiting, None)
                if seed is None:
                    break
                dialog = _Dialog(seed, decoder, settings)
                try:
                    if dialog.begin():
                        slots[index] = dialog
                    else:
                        yield TooLong(seed.id)
                except Malformed as reason:
                    yield Failed(seed.id, str(reason))
        steps = decoder.step()
        if not steps:
            return
        states = torch.cat([sequence.pending.hidden for sequence, _ in steps]).to("cpu", torch.bfloat16)
        running = {dialog.sequence: dialog for dialog in slots if dialog is not None}
        for (sequence, step), state in zip(steps, states, strict=True):
            running[sequence].tokens += step.tokens
            running[sequence].states[sequence.pending.start] = state


class _Dialog:
    """Conversation under way: its messages, its tokens so far, and the states of all but the last of them."""

    def __init__(self, seed: Conversation, decoder: Decoder, settings: DistillRecipe) -> None:
        self.seed, self.decoder, self.settings, self.backbone = seed, decoder, settings, decoder.backbone
        self.turns = seed.turns[: settings.max_turns]
        self.context = min(settings.context, self.backbone.max_positions)
        self.messages = [] if seed.system is None else seed.messages[:1]
        self.tokens: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self.states = torch.empty(0)
        self.answer_start = 0

    def begin(self) -> bool:
        """Asks the first question; returns False if its prompt is too long, raises Malformed if it has no layout."""
        if len(self.turns[0]) > TOKEN_CHARACTERS * self.context:
            return False
        self.messages = [*self.messages, {"role": "user", "content": self.turns[0]}]
        return self._generate(token_ids(self.backbone, render(self.backbone, self.messages, prompt=True)))

    def next_turn(self) -> bool:
        """Closes the answer just written and asks the next question; returns False if none is left or fits."""
        self.spans.append((self.answer_start, len(self.tokens)))
        answer = self.backbone.decode(self.tokens[self.answer_start :])
        self.messages.append({"role": "assistant", "content": answer})
        if len(self.spans) == len(self.turns):
            return False
        question = {"role": "user", "content": self.turns[len(self.spans)]}
        try:
            bridge = after_answer(self.backbone, [*self.messages, question], prompt=True)
        except Malformed:
            return False
        if bridge is None or not self._generate(token_ids(self.backbone, bridge)):
            return False
        self.messages.append(question)
        return True

    def answered(self) -> Answered:
        conversation = Conversation(self.seed.id, self.messages, self.tokens, self.spans)
        return Answered(conversation, self.states[: len(self.tokens) - 1])

    def _generate(self, more: list[int]) -> bool:
        """Begins an answer after these tokens; returns False where it does not fit the context."""
        if more[:1] == self.tokens[-1:]:  # the answer's own end token opens the bridge
            more = more[1:]
        limit = self.settings.max_new_tokens
        if len(self.tokens) + len(more) + limit > self.context:
            return False
        # The last token of an answer is decided but not yet run. The prefix of no other text serves: this
        # conversation's states are kept as they come.
        known = max(0, len(self.tokens) - 1)
        prompt = [*self.tokens, *more]
        sampling = Sampling.by_name(self.settings.temperature, f"{self.settings.random_seed}:{self.seed.id}")
        self.sequence, first = self.decoder.admit(Request(prompt, limit, sampling, reuse=known), len(self.spans))
        if not known:
            width = self.backbone.hidden_size * len(self.decoder.taps)
            self.states = torch.empty(self.context, width, dtype=torch.bfloat16)
        start = self.sequence.pending.start
        self.states[start : len(prompt)] = self.sequence.pending.hidden
        self.tokens, self.answer_start = prompt + first.tokens, len(prompt)
        return True
