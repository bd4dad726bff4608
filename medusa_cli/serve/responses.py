"""OpenAI's Responses API: request bodies, their conversion to chats, and answers as items, whole or in events."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from medusa_cli.serve import neutral
from medusa_cli.serve.calls import CallReader
from medusa_cli.serve.errors import Refusal, failure
from medusa_cli.serve.openai_format import speculative_figures, sse
from medusa_cli.serve.scheduler import Event, Ticket
from medusa_cli.serve.schema import (
    FORM,
    LIST,
    MAX_TOOLS,
    TEXT,
    ChatRequest,
    Common,
    Content,
    Function,
    NamedSchema,
    Strict,
    ToolChoice,
    check_json,
    text_of,
)

# Field names of /v1/responses, by the equivalent fields of chats.
FIELDS = {"messages": "input", "response_format": "text", "max_tokens": "max_output_tokens"}


class AnyTextPart(Strict):
    """A part of a message's content."""

    no_effect = neutral.MARKS
    type: Literal["input_text", "output_text", "text"]
    text: str


class PastItem(Strict):
    """The fields that every past item may have."""

    no_effect = neutral.MARKS


class MessageItem(PastItem):
    """A turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content[AnyTextPart]


class CallItem(PastItem):
    """A past call of a tool."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(PastItem):
    """The result of a past call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content[AnyTextPart]


def _kind(value: Any) -> str:
    kind = (value.get("type") or "message") if isinstance(value, dict) else "message"
    return f"<{kind}>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")],
    Discriminator(_kind),
]


class TextFormat(NamedSchema):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Strict):
    no_effect = neutral.REQUEST
    format: TextFormat = TextFormat()


class Typed(Strict):
    """The only supported type of tool, which is checked before the other fields."""

    type: Literal["function"]


class FunctionTool(Function, Typed):
    """A function that the model may call."""


class ChosenTool(Typed):
    """The choice of one tool."""

    name: str


class AllowedTools(Strict):
    """The choice of some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[ChosenTool] = Field(min_length=1, max_length=MAX_TOOLS)


class ResponsesRequest(Common):
    """The body of /v1/responses, with the fields that have an equivalent in a chat. Nothing is stored."""

    no_effect = neutral.RESPONSES
    input: Annotated[
        Annotated[str, Field(min_length=1), Tag(TEXT)]
        | Annotated[list[Item], Field(min_length=1), Tag(LIST)],
        FORM,
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions = TextOptions()
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice[ChosenTool, AllowedTools] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str], AfterValidator(check_json)] | None = Field(
        None, description="comes back with the response"
    )

    @model_validator(mode="after")
    def _agree(self) -> "ResponsesRequest":
        if (self.text.format.type == "json_schema") != (self.text.format.schema_ is not None):
            raise ValueError("text.format: schema and the type json_schema belong together")
        return self

    def chat(self) -> ChatRequest:
        """Returns the equivalent chat request; raises ValidationError for items that do not belong together."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self._messages(),
            "stream": self.stream,
        }
        body |= {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        given = self.text.format
        if given.type == "json_object":
            body["response_format"] = {"type": "json_object"}
        elif given.type == "json_schema":
            schema = {"name": given.name, "schema": given.schema_}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        functions = [tool.model_dump(exclude={"type", "strict"}) for tool in self.tools or ()]
        body["tools"] = [{"type": "function", "function": function} for function in functions]
        body["tool_choice"] = self.tool_choice
        choice = self.tool_choice
        if isinstance(choice, ChosenTool):
            body["tool_choice"] = _named(choice)
        elif isinstance(choice, AllowedTools):
            subset = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
            body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": subset}
        body["speculative"] = self.speculative
        return ChatRequest(**body, parallel_tool_calls=self.parallel_tool_calls)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, MessageItem):
                messages.append({"role": item.role, "content": text_of(item.content)})
            elif isinstance(item, CallOutputItem):
                messages.append(
                    {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
                )
            else:
                call = {
                    "id": item.call_id,
                    "function": {"name": item.name, "arguments": item.arguments},
                }
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
        return messages


def _named(tool: ChosenTool) -> dict[str, Any]:
    """Returns the choice of a tool in the format of chats."""
    return {"type": "function", "function": {"name": tool.name}}


class ResponsesFormat:
    """Formats the answer to one request as items (messages and calls), and as the events that announce them."""

    def __init__(self, body: ResponsesRequest, chat: ChatRequest, ticket: Ticket) -> None:
        self._body = body
        self._ticket = ticket
        # What holds if the request does not say it.
        self._several = not chat.required
        if body.parallel_tool_calls is not None:
            self._several = body.parallel_tool_calls
        names = [tool["function"]["name"] for tool in chat.offered]
        self._calls = CallReader(names) if names else None
        self._id = _new_id("resp")
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open = False  # whether the last item is unfinished
        self._sequence = 0

    def whole(self) -> dict[str, Any]:
        """Returns the finished response."""
        self._add(self._ticket.answer.text, last=True)
        return self._response(ended=True)

    async def stream(self, events: AsyncGenerator[tuple[int, Event]]) -> AsyncIterator[str]:
        """Yields the response as named server-sent events."""
        async with aclosing(events):
            for name in ("response.created", "response.in_progress"):
                yield self._event(name, response=self._response())
            async for _, event in events:
                if event.error is not None:
                    error = {"code": "server_error", "message": str(failure(event.error))}
                    failed = {**self._response(), "status": "failed", "error": error}
                    yield self._event("response.failed", response=failed)
                    return
                for item_event in self._add(
                    "".join(piece.text for piece in event.pieces), event.last
                ):
                    yield item_event
        cut = self._ticket.answer.finish_reason == "length"
        response = self._response(ended=True)
        yield self._event("response.incomplete" if cut else "response.completed", response=response)

    def _event(self, name: str, /, **fields: Any) -> str:
        self._sequence += 1
        return sse({"type": name, "sequence_number": self._sequence - 1, **fields}, name)

    def _add(self, text: str, last: bool) -> list[str]:
        """Adds text to the items; returns the events."""
        delta: dict[str, Any] = {"content": text} if text else {}
        if self._calls is not None:
            delta = self._calls.feed(text, last)
        events = []
        calls = list(delta.get("tool_calls", ()))
        while calls and "id" not in calls[0]:  # the rest of the open call
            events += self._add_arguments(calls.pop(0)["function"]["arguments"])
        if content := delta.get("content"):
            if not self._open or self._items[-1]["type"] != "message":
                events += self._begin(
                    {"id": _new_id("msg"), "type": "message", "role": "assistant", "content": []}
                )
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                events.append(
                    self._event(
                        "response.content_part.added", **self._place(), content_index=0, part=part
                    )
                )
                self._items[-1]["content"] = [dict(part)]
            self._items[-1]["content"][0]["text"] += content
            place = {**self._place(), "content_index": 0, "logprobs": []}
            events.append(self._event("response.output_text.delta", **place, delta=content))
        for call in calls:
            function = call["function"]
            if "id" in call:
                item = {
                    "id": _new_id("fc"),
                    "type": "function_call",
                    "call_id": call["id"],
                    "name": function["name"],
                }
                events += self._begin({**item, "arguments": ""})
            events += self._add_arguments(function["arguments"])
        return events + (self._end() if last else [])

    def _add_arguments(self, arguments: str) -> list[str]:
        """Adds to the arguments of the open call; returns the events."""
        if not arguments:
            return []
        self._items[-1]["arguments"] += arguments
        name = "response.function_call_arguments.delta"
        return [self._event(name, **self._place(), delta=arguments)]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _begin(self, item: dict[str, Any]) -> list[str]:
        """Begins an item; returns the events, after those that end the previous item."""
        events = self._end()
        self._items.append({**item, "status": "in_progress"})
        self._open = True
        index = len(self._items) - 1
        return [
            *events,
            self._event(
                "response.output_item.added", output_index=index, item=dict(self._items[-1])
            ),
        ]

    def _end(self) -> list[str]:
        """Ends the open item, if any; returns the events."""
        if not self._open:
            return []
        self._open = False
        item = self._items[-1]
        place = self._place()
        item["status"] = (
            "incomplete" if self._ticket.answer.finish_reason == "length" else "completed"
        )
        if item["type"] == "message":
            [part] = item["content"]
            at = {**place, "content_index": 0}
            events = [
                self._event("response.output_text.done", **at, text=part["text"], logprobs=[]),
                self._event("response.content_part.done", **at, part=part),
            ]
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **place, **done)]
        return [
            *events,
            self._event(
                "response.output_item.done", output_index=place["output_index"], item=dict(item)
            ),
        ]

    def _response(self, ended: bool = False) -> dict[str, Any]:
        body = self._body
        stats = self._ticket.answer.stats
        answer = self._ticket.answer
        cut = ended and answer.finish_reason == "length"
        given = body.model_dump(
            include={"text", "tools", "tool_choice"}, by_alias=True, exclude_none=True
        )
        prompt = len(self._ticket.request.prompt)
        usage: dict[str, Any] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._ticket.reused, "cache_write_tokens": 0},
            "output_tokens": stats.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + stats.tokens,
        }
        if body.drafts.figures:
            usage["medusa"] = speculative_figures([self._ticket], by_position=True)
        status = "in_progress"
        if ended:
            status = "incomplete" if cut else "completed"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": self._items if ended else [],
            "parallel_tool_calls": self._several,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage if ended else None,
            "tools": [],
            "tool_choice": "auto",
            **given,
        }


def in_responses(reason: Refusal) -> Refusal:
    """Returns a chat's refusal, with the field names of /v1/responses."""
    field = str(reason.param).partition(".")[0]
    if field in FIELDS:
        text = str(reason).replace(str(reason.param), FIELDS[field])
        return reason.reworded(text, FIELDS[field])
    return reason


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
