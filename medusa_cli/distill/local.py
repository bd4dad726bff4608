"""Answers from a model on this machine, for many conversations at a time, with the hidden states of every position."""

import logging
import os
from collections import abc
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.data.conversation import Conversation
from medusa_cli.decode import Decoder, Request, Sampling, Sequence
from medusa_cli.decode.cuda_graph import ROWS
from medusa_cli.device import free_memory, upload
from medusa_cli.drafters.base import with_last_layer
from medusa_cli.files.io import Malformed
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import Message, after_answer, render, token_ids
from medusa_cli.runs.recipe import DistillRecipe

# The largest batches. On a CPU, a larger batch would gain nothing, and its last answers would leave
# more slots idle. On a GPU, a step takes about as long for 256 rows as for 64.
MAX_BATCH = 64
GPU_BATCH = 256
# New prompts wait until one in this many slots is free, so that several prompts run in one pass.
PACKS = 16
# Share of the free memory for caches and states; forward passes need memory as well.
MEMORY_SHARE = 0.7
# Typical maximum number of characters per token. A prompt that is longer than a context of such
# tokens is dropped without being tokenized.
TOKEN_CHARACTERS = 8
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Holds a seed's conversation and its hidden states [len(tokens) - 1, H * taps]; servers send no states.

    If there is no conversation, `failure` is the reason, or None if the prompt is too long for the context.
    """

    id: str
    conversation: Conversation | None = None
    states: Tensor | None = None
    failure: str | None = None


def choose_batch_size(backbone: Backbone, settings: DistillRecipe, processes: int) -> int:
    """Returns how many conversations fit in the free memory, up to a maximum; logs the number if it is smaller.

    Each conversation needs memory for its hidden states and its KV cache. On a GPU, the cache also has the rows of the
    largest graph.
    """
    config = backbone.config
    shared = backbone.device.type != "cuda"
    # The processes on this machine share its main memory.
    free = free_memory(backbone.device) // (
        int(os.environ.get("LOCAL_WORLD_SIZE", processes)) if shared else 1
    )
    context = min(settings.context, backbone.max_positions)
    largest = MAX_BATCH if shared else GPU_BATCH
    rows = context if shared else context + ROWS[-1]
    needed = backbone.engine.row_bytes * rows + backbone.engine.slot_bytes(1)
    needed += 2 * config.hidden_size * (len(settings.taps) + 1) * context
    count = max(1, min(largest, int(MEMORY_SHARE * free) // needed))
    if count < largest:
        log.info(
            f"{count} conversations at a time: {free / 1e9:.1f} GB are free for their {context:,} positions each; "
            "distill.batch_size=N takes others"
        )
    return count


def answer_locally(
    backbone: Backbone,
    seeds: abc.Sequence[Conversation],
    settings: DistillRecipe,
    on_tokens: Callable[[int], None] = lambda count: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome]:
    """Answers each seed's turns in order with the backbone; yields each outcome as soon as it is complete.

    on_tokens: called with the number of new answer tokens in each step. should_stop: if it returns
    True, no further turn is asked, and only the open answers are completed.
    """
    batch = _Batch(backbone, seeds, settings, should_stop)
    while True:
        # An answer may end with its very first token, so several turns and seeds may pass through a
        # slot here.
        while batch.has_free_pack:
            asked = yield from batch.ask()
            if not asked:
                break
            batch.admit(asked)
            on_tokens(len(asked))
        if not (count := batch.step()):
            return
        on_tokens(count)


class _Batch:
    """Answers several conversations at a time, each in a slot of one decoder; keeps their states on the device."""

    def __init__(
        self,
        backbone: Backbone,
        seeds: abc.Sequence[Conversation],
        settings: DistillRecipe,
        should_stop: Callable[[], bool],
    ) -> None:
        self.settings = settings
        self.waiting = iter(seeds)
        self.should_stop = should_stop
        count = min(settings.batch_size or MAX_BATCH, max(1, len(seeds)))
        self.slots: list[_Answering | None] = [None] * count
        taps = with_last_layer(settings.taps)
        context = min(settings.context, backbone.max_positions)
        self.decoder = Decoder(backbone, slots=count, taps=taps, context=context)
        needed = count * (context * backbone.engine.row_bytes + backbone.engine.slot_bytes(1))
        if context > self.decoder.cache.capacity and needed <= free_memory(backbone.device):
            # The whole cache is reserved at once. If it grew, the old buffers would also take
            # memory.
            self.decoder.cache.resize(context)
        width = backbone.hidden_size * len(taps)
        self.states = torch.empty(
            count, context, width, dtype=torch.bfloat16, device=backbone.device
        )
        # A GPU runs several prompts in one pass, so free slots wait until there are a few.
        self.pack = min(self.decoder.prompts_at_once, max(1, count // PACKS))

    @property
    def has_free_pack(self) -> bool:
        return not self.decoder.sequences or self.decoder.free_slots >= self.pack

    def ask(self) -> Generator[Outcome, None, list[tuple["_Answering", Request]]]:
        """Returns the next questions for free slots, at most `pack`; yields the outcomes of conversations that end."""
        asked: list[tuple[_Answering, Request]] = []
        for slot, current in enumerate(self.slots):
            if len(asked) == self.pack:
                break
            if current is None:
                current = self._next_conversation(slot)
            elif current.sequence.done:
                current.end_turn()
            else:
                continue
            while current is not None and (request := current.ask(self.should_stop())) is None:
                yield current.outcome()
                current = self._next_conversation(slot)
            self.slots[slot] = current
            if current is not None and request is not None:
                asked.append((current, request))
        return asked

    def _next_conversation(self, slot: int) -> "_Answering | None":
        seed = None if self.should_stop() else next(self.waiting, None)
        if seed is None:
            return None
        return _Answering(seed, self.decoder, self.settings, self.states[slot])

    def admit(self, asked: abc.Sequence[tuple["_Answering", Request]]) -> None:
        """Runs the prompts of questions, and begins their answers."""
        numbers = [len(current.spans) for current, _ in asked]
        admitted = self.decoder.admit_all([request for _, request in asked], numbers)
        for (current, _), (sequence, first) in zip(asked, admitted, strict=True):
            current.begin(sequence, first.tokens)

    def step(self) -> int:
        """Decodes one step of every open answer; returns the number of new tokens, or 0 at the end."""
        steps = self.decoder.step()
        if not steps:
            return 0
        running = {
            current.sequence: (slot, current)
            for slot, current in enumerate(self.slots)
            if current is not None
        }
        context, width = self.states.shape[1:]
        rows = []
        for sequence, step in steps:
            slot, current = running[sequence]
            current.tokens += step.tokens
            rows.append(slot * context + sequence.unread[0].start)
        hidden = torch.cat([sequence.unread[0].hidden for sequence, _ in steps])
        places = upload(rows, self.states.device)
        self.states.view(-1, width).index_copy_(0, places, hidden.to(self.states.dtype))
        return sum(len(step.tokens) for _, step in steps)


class _Answering:
    """Answers one conversation; holds its tokens so far, the states of all tokens but the last, and the open answer."""

    def __init__(
        self, seed: Conversation, decoder: Decoder, settings: DistillRecipe, states: Tensor
    ) -> None:
        self.seed = seed
        self.settings = settings
        self.backbone = decoder.backbone
        self.questions = seed.questions[: 1 if seed.raw else settings.max_turns]
        self.context = min(settings.context, self.backbone.max_positions)
        self.messages: list[Message] = []
        self.tokens: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self.states = states
        self.prompt: list[int] = []
        self.failure: str | None = None

    def ask(self, stop: bool) -> Request | None:
        """Returns the request for the next question, or None at the end of the conversation.

        The conversation also ends if an answer would not fit in the context, and before a second
        question if `stop` is True. If the chat template rejects the question, the conversation ends
        with a failure.
        """
        if stop and self.spans:
            return None
        try:
            return self._request()
        except Malformed as reason:
            self.failure = str(reason)
            return None

    def _request(self) -> Request | None:
        question = next(iter(self.questions[len(self.spans) :]), None)
        if question is None or len(question[-1]["content"]) > TOKEN_CHARACTERS * self.context:
            return None
        messages = [*self.messages, *question]
        if self.seed.raw:
            text: str | None = question[-1]["content"]
        else:
            lay_out = after_answer if self.spans else render
            text = lay_out(self.backbone, messages, prompt=True)
        if text is None:
            return None

        more = token_ids(self.backbone, text, begin=bool(self.seed.raw))
        limit = self.settings.max_new_tokens
        if more[:1] == self.tokens[-1:]:  # the answer's own end token opens the next prompt
            more = more[1:]
        prompt = [*self.tokens, *more]
        if len(prompt) + limit > self.context:
            return None
        self.messages = messages
        self.prompt = prompt
        # The last token of an answer has been chosen but not yet run. The cached prefix of another
        # text cannot be reused, because this conversation needs the states of all its positions.
        known = max(0, len(self.tokens) - 1)
        sampling = Sampling.by_name(
            self.settings.temperature, f"{self.settings.random_seed}:{self.seed.id}"
        )
        return Request(prompt, limit, sampling, reuse=known)

    def begin(self, sequence: Sequence, tokens: list[int]) -> None:
        """Begins an answer with its first token, and keeps the states of its prompt."""
        self.sequence = sequence
        self.states[sequence.reused : len(self.prompt)] = sequence.unread[0].hidden
        self.tokens = self.prompt + tokens

    def end_turn(self) -> None:
        """Closes the answer that has just ended."""
        start = len(self.prompt)
        self.spans.append((start, len(self.tokens)))
        answer = self.backbone.decode(self.tokens[start:])
        self.messages.append({"role": "assistant", "content": answer})

    def outcome(self) -> Outcome:
        """Returns the failure if there is one, otherwise the part of the conversation that was answered."""
        if self.failure is not None or not self.spans:
            return Outcome(self.seed.id, failure=self.failure)
        conversation = Conversation(
            self.seed.id, self.messages, self.tokens, self.spans, raw=self.seed.raw
        )
        states = self.states[: len(self.tokens) - 1].to("cpu", copy=True)
        return Outcome(self.seed.id, conversation, states)
