"""Answers requests: submits tickets to the scheduler, and formats the steps as answers."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

from medusa_cli import __version__
from medusa_cli.api import Medusa
from medusa_cli.serve.answer_format import AnswerFormat
from medusa_cli.serve.chats import ChatRequest
from medusa_cli.serve.completions import CompletionRequest
from medusa_cli.serve.infill import infill_ends
from medusa_cli.serve.llama_cpp import InfillRequest, LlamaFormat, LlamaSampling
from medusa_cli.serve.middleware import Limits, Receive
from medusa_cli.serve.openai_format import OpenAIFormat
from medusa_cli.serve.preparation import Preparation
from medusa_cli.serve.refusals import Refusal, check_whole, failure, refusal_for_body
from medusa_cli.serve.responses import ResponsesFormat
from medusa_cli.serve.scheduler import WAITING, Event, Scheduler, Ticket
from medusa_cli.serve.templates import TemplateProcess
from medusa_cli.serve.tokens import DetokenizeRequest, TokenizeChat, TokenizeText
from medusa_cli.serve.tools import template_of

Translation = TypeVar(
    "Translation", ChatRequest, CompletionRequest, ChatRequest | CompletionRequest
)
# Returns the format of an answer, given the answer's ticket.
Shape = Callable[[Ticket], AnswerFormat]
# Seconds without an event after which a stream sends a line, so that clients keep waiting.
KEEP_ALIVE_S = 5.0


@contextmanager
def renamed(fields: Mapping[str, str]) -> Iterator[None]:
    """Replaces the field names of chats and completions in refusals with those of another API."""
    try:
        yield
    except Refusal as refusal:
        raise refusal.renamed(fields) from refusal


async def translated(body: BaseModel, translate: Callable[[], Translation]) -> Translation:
    """Returns the chat or completion that is equivalent to a request to another API; raises Refusal."""
    await run_in_threadpool(check_whole, body)
    try:
        translation = await run_in_threadpool(translate)
    except ValidationError as reason:
        raise refusal_for_body(reason.errors()) from reason
    translation.record = translation.record and getattr(body, "record", True)
    return translation


class LargeResponse(JSONResponse):
    """Encodes a JSON response, which may be large, piece by piece, so that other threads can run meanwhile."""

    def render(self, content: Any) -> bytes:
        encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return "".join(encoder.iterencode(content)).encode()


class Handler:
    """Submits requests to the scheduler and formats their answers."""

    def __init__(
        self, medusa: Medusa, scheduler: Scheduler, limits: Limits, templates: TemplateProcess
    ) -> None:
        self.backbone = medusa.backbone
        self.names = limits.names
        self._scheduler = scheduler
        self._limits = limits
        self.preparation = Preparation(medusa, scheduler, limits, templates)

    def props(self) -> dict[str, Any]:
        """Returns the properties that llama.cpp's clients read."""
        limits = self._limits
        tokenizer = self.backbone.tokenizer
        longest = -1 if limits.max_new_tokens is None else limits.max_new_tokens
        params = {"temperature": limits.temperature, "top_k": 0, "top_p": 1.0, "n_predict": longest}
        return {
            "default_generation_settings": {"n_ctx": self.preparation.context, "params": params},
            "total_slots": limits.slots,
            "model_alias": limits.names[0],
            "model_path": limits.names[0],
            "modalities": {"vision": False, "audio": False},
            "chat_template": template_of(self.backbone),
            "bos_token": tokenizer.bos_token or "",
            "eos_token": tokenizer.eos_token or "",
            "build_info": f"medusa {__version__}",
        }

    def slots(self) -> list[dict[str, Any]]:
        """Returns each slot's state in llama.cpp's format, without any text."""
        idle: dict[str, Any] = {
            "n_ctx": self.preparation.context,
            "is_processing": False,
            "speculative": self._scheduler.speculative,
        }
        slots = [{"id": number, **idle} for number in range(self._limits.slots)]
        for slot, ticket in zip(slots, self._scheduler.running(), strict=False):
            left = ticket.request.max_new_tokens - ticket.answer.stats.tokens
            slot["is_processing"] = True
            slot["n_prompt_tokens"] = len(ticket.request.prompt)
            slot["next_token"] = {"n_decoded": ticket.answer.stats.tokens, "n_remain": left}
        return slots

    async def answer(
        self, body: ChatRequest | CompletionRequest, receive: Receive, shape: Shape | None = None
    ) -> Response:
        """Returns the whole answer, or a stream of it, in the requested format; raises Refusal.

        shape: makes the format from a ticket; None means OpenAI's format of chats and completions.
        """
        await run_in_threadpool(check_whole, body)
        body.model = body.model or self.names[0]
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(index: int, event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

        tickets = await self.preparation.tickets(body, deliver)
        answer: OpenAIFormat | AnswerFormat
        if shape is None:
            answer = await run_in_threadpool(OpenAIFormat, self.backbone, body, tickets)
        else:
            answer = shape(tickets[0])

        for ticket in tickets:
            ticket.reports = body.stream and body.return_progress
        self._scheduler.submit(tickets)
        received = _until_gone(tickets, events, receive)
        if body.stream:
            lines = answer.stream(received)
            # The second header keeps nginx from buffering the text.
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(lines, media_type=answer.media, headers=headers)
        async with aclosing(received):
            async for _, event in received:
                if event.error is not None:
                    raise failure(event.error)
                if isinstance(answer, ResponsesFormat):
                    answer.read(event)
        return await run_in_threadpool(lambda: LargeResponse(answer.whole()))

    async def continued(
        self, body: LlamaSampling, prompt: str | list[int], receive: Receive
    ) -> Response:
        """Returns the answer to a prompt in llama.cpp's format; raises Refusal."""
        completion = await translated(body, partial(body.completion, prompt))
        name = completion.model or self.names[0]
        return await self.answer(
            completion, receive, partial(LlamaFormat, self.backbone, body, name)
        )

    async def infill(self, body: InfillRequest, receive: Receive) -> Response:
        """Returns the text between a prefix and a suffix, in llama.cpp's format; raises Refusal."""
        await run_in_threadpool(check_whole, body)
        prompt = await self.preparation.infill(body)
        body.stop_token_ids = [*body.stop_token_ids, *infill_ends(self.backbone)]
        return await self.continued(body, prompt, receive)

    async def count(self, chat: ChatRequest) -> int:
        """Returns the number of tokens of a chat's prompt; raises Refusal."""
        [tokens] = await self.preparation.encode(chat)
        return len(tokens)

    async def truncate(self, chat: ChatRequest) -> None:
        """Drops a chat's oldest turns until the prompt fits in the context; raises Refusal.

        A turn begins with a user's message, and is dropped as a whole. The system messages at the start and the last
        turn always stay.
        """
        messages = chat.messages
        first = next((i for i, turn in enumerate(messages) if not turn.is_system), 0)
        starts = [i for i, turn in enumerate(messages) if i > first and turn.role == "user"]
        low, high = 0, len(starts)
        while low < high:
            middle = (low + high) // 2
            chat.messages = [*messages[:first], *messages[([first, *starts])[middle] :]]
            [tokens] = await self.preparation.encode(chat)
            if len(tokens) < self.preparation.context:
                high = middle
            else:
                low = middle + 1
        chat.messages = [*messages[:first], *messages[([first, *starts])[low] :]]

    async def tokenize(self, body: TokenizeText | TokenizeChat) -> dict[str, Any]:
        """Returns the token ids of a text or a conversation, under vLLM's and llama.cpp's names; raises Refusal."""
        await run_in_threadpool(check_whole, body)
        [tokens] = await self.preparation.encode(body)
        tokenizer = self.backbone.tokenizer
        if isinstance(body, TokenizeText) and body.with_pieces:
            pieces = await run_in_threadpool(lambda: [tokenizer.decode([id]) for id in tokens])
            named = zip(tokens, pieces, strict=True)
            return {"tokens": [{"id": id, "piece": piece} for id, piece in named]}
        texts = None
        if body.return_token_strs:
            texts = await run_in_threadpool(tokenizer.convert_ids_to_tokens, tokens)
        return {
            "count": len(tokens),
            "max_model_len": self.preparation.context,
            "tokens": tokens,
            "token_strs": texts,
        }

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        """Returns the text of token ids, with special tokens, under vLLM's and llama.cpp's names; raises Refusal."""
        [tokens] = await self.preparation.encode(body)
        text = await run_in_threadpool(self.backbone.tokenizer.decode, tokens)
        return {"prompt": text, "content": text}


async def _until_gone(
    tickets: list[Ticket], events: asyncio.Queue[tuple[int, Event]], receive: Receive
) -> AsyncGenerator[tuple[int, Event]]:
    """Yields the events of all choices, each with its choice's index; WAITING after KEEP_ALIVE_S without an event.

    If the client disconnects or stops reading, its slots are freed.
    """

    def abandon() -> None:
        for ticket in tickets:
            ticket.abandoned = True

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        abandon()

    watcher = asyncio.create_task(watch())
    unfinished = len(tickets)
    try:
        while unfinished:
            index, event = 0, WAITING
            with suppress(TimeoutError):
                index, event = await asyncio.wait_for(events.get(), KEEP_ALIVE_S)
            if tickets[0].abandoned:
                return
            yield index, event
            unfinished -= event.last
    finally:
        watcher.cancel()
        abandon()
