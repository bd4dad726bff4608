"""Answers from a model on this machine, for many conversations at a time, with hidden states at every position."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.data.conversation import Conversation
from medusa_cli.decode import Decoder, Request, Sampling
from medusa_cli.decode.cuda_graph import ROWS
from medusa_cli.device import free_memory
from medusa_cli.drafters.base import with_last_layer
from medusa_cli.files.io import Malformed
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import Message, after_answer, render, token_ids
from medusa_cli.runs.recipe import DistillRecipe

# A larger batch gains nothing on a CPU, and its last answers would leave more slots idle. On a GPU,
# a step takes about as long for 256 rows as for 64.
MAX_BATCH = 64
GPU_BATCH = 256
# Share of the free memory for caches and states; forward passes need some as well.
MEMORY_SHARE = 0.7
# Typical maximum of characters per token; longer prompts are dropped without tokenizing them.
TOKEN_CHARACTERS = 8
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Holds a seed's conversation and its hidden states [len(tokens) - 1, H * taps]; servers send no states.

    If there is no conversation, failure is the reason, or None if the prompt is too long for the
    context.
    """

    id: str
    conversation: Conversation | None = None
    states: Tensor | None = None
    failure: str | None = None


def choose_batch_size(backbone: Backbone, settings: DistillRecipe, processes: int) -> int:
    """Returns how many conversations fit in the free memory, up to a maximum; logs the number if it is less.

    Each conversation needs memory for its KV cache, on a GPU with the rows of the largest graph.
    Elsewhere, its hidden states need space in the same memory.
    """
    config = backbone.config
    shared = backbone.device.type != "cuda"
    # The processes on this machine share its main memory.
    free = free_memory(backbone.device) // (
        int(os.environ.get("LOCAL_WORLD_SIZE", processes)) if shared else 1
    )
    context = min(settings.context, backbone.max_positions)
    position: int = backbone.engine.row_bytes
    if shared:
        position += config.hidden_size * (len(settings.taps) + 1) * backbone.dtype.itemsize
    largest = MAX_BATCH if shared else GPU_BATCH
    rows = context if shared else context + ROWS[-1]
    needed = position * rows + backbone.engine.slot_bytes(1)
    count = max(1, min(largest, int(MEMORY_SHARE * free) // needed))
    if count < largest:
        log.info(
            f"{count} conversations at a time: {free / 1e9:.1f} GB are free for their {context:,} positions each; "
            "distill.batch_size=N takes others"
        )
    return count


def answer_locally(
    backbone: Backbone,
    seeds: Sequence[Conversation],
    settings: DistillRecipe,
    on_tokens: Callable[[int], None] = lambda count: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome]:
    """Answers each seed's turns in order with the backbone; yields each seed's outcome as soon as it ends.

    on_tokens: called with the number of new answer tokens in each step. should_stop: if it returns
    True, no further turn is asked, and only the open answers are completed.
    """
    waiting = iter(seeds)
    count = min(settings.batch_size or MAX_BATCH, max(1, len(seeds)))
    slots: list[_Answering | None] = [None] * count
    taps = with_last_layer(settings.taps)
    context = min(settings.context, backbone.max_positions)
    decoder = Decoder(backbone, slots=len(slots), taps=taps, context=context)
    needed = count * (context * backbone.engine.row_bytes + backbone.engine.slot_bytes(1))
    if context > decoder.cache.capacity and needed <= free_memory(backbone.device):
        # At once: while a cache grows, the old one takes memory, too.
        decoder.cache.resize(context)
    while True:
        for index in range(len(slots)):
            # An answer may end with its very first token, so several turns and seeds may pass
            # through a slot here.
            while (current := slots[index]) is None or current.sequence.done:
                if current is not None:
                    current.end_turn()
                elif not should_stop() and (seed := next(waiting, None)) is not None:
                    current = _Answering(seed, decoder, settings)
                else:
                    break
                slots[index] = None
                failure = None
                try:
                    if not (current.spans and should_stop()) and current.ask():
                        slots[index] = current
                        on_tokens(1)
                        continue
                except Malformed as reason:
                    failure = str(reason)
                yield current.outcome(failure)

        steps = decoder.step()
        if not steps:
            return
        states = torch.cat([sequence.unread[0].hidden for sequence, _ in steps]).to(
            "cpu", torch.bfloat16
        )
        running = {current.sequence: current for current in slots if current is not None}
        for (sequence, step), state in zip(steps, states, strict=True):
            running[sequence].tokens += step.tokens
            running[sequence].states[sequence.unread[0].start] = state
        on_tokens(sum(len(step.tokens) for _, step in steps))


class _Answering:
    """Answers one conversation; holds its tokens so far, the states of all but the last, and the open answer."""

    def __init__(self, seed: Conversation, decoder: Decoder, settings: DistillRecipe) -> None:
        self.seed = seed
        self.decoder = decoder
        self.settings = settings
        self.backbone = decoder.backbone
        self.questions = seed.questions[: 1 if seed.raw else settings.max_turns]
        self.context = min(settings.context, self.backbone.max_positions)
        self.messages: list[Message] = []
        self.tokens: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self.states = torch.empty(0)
        self.answer_start = 0

    def ask(self) -> bool:
        """Asks the next question; returns False if none is left or an answer to it would not fit in the context.

        Raises Malformed if the chat template rejects the question.
        """
        question = next(iter(self.questions[len(self.spans) :]), None)
        if question is None or len(question[-1]["content"]) > TOKEN_CHARACTERS * self.context:
            return False
        messages = [*self.messages, *question]
        if self.seed.raw:
            text: str | None = question[-1]["content"]
        else:
            lay_out = after_answer if self.spans else render
            text = lay_out(self.backbone, messages, prompt=True)
        if text is None:
            return False

        more = token_ids(self.backbone, text, begin=bool(self.seed.raw))
        limit = self.settings.max_new_tokens
        if more[:1] == self.tokens[-1:]:  # the answer's own end token opens the next prompt
            more = more[1:]
        prompt = [*self.tokens, *more]
        if len(prompt) + limit > self.context:
            return False

        # The last token of an answer is chosen but not yet run. The prefix of another text cannot
        # be reused, because this conversation needs the states of all its positions.
        known = max(0, len(self.tokens) - 1)
        sampling = Sampling.by_name(
            self.settings.temperature, f"{self.settings.random_seed}:{self.seed.id}"
        )
        self.sequence, first = self.decoder.admit(
            Request(prompt, limit, sampling, reuse=known), len(self.spans)
        )
        if not known:
            width = self.backbone.hidden_size * len(self.decoder.taps)
            self.states = torch.empty(self.context, width, dtype=torch.bfloat16)
        self.states[self.sequence.reused : len(prompt)] = self.sequence.unread[0].hidden

        self.messages = messages
        self.tokens = prompt + first.tokens
        self.answer_start = len(prompt)
        return True

    def end_turn(self) -> None:
        """Closes the answer that has just ended."""
        self.spans.append((self.answer_start, len(self.tokens)))
        answer = self.backbone.decode(self.tokens[self.answer_start :])
        self.messages.append({"role": "assistant", "content": answer})

    def outcome(self, failure: str | None) -> Outcome:
        """Returns the failure if there is one, else the part of the conversation that was answered."""
        if failure is not None or not self.spans:
            return Outcome(self.seed.id, failure=failure)
        conversation = Conversation(
            self.seed.id, self.messages, self.tokens, self.spans, raw=self.seed.raw
        )
        return Outcome(self.seed.id, conversation, self.states[: len(self.tokens) - 1])
