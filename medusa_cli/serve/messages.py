"""Anthropic's Messages API: request bodies, their conversion to chats, and answers as content blocks."""

import json
import uuid
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from medusa_cli.errors import shown
from medusa_cli.model import Backbone
from medusa_cli.serve import neutral
from medusa_cli.serve.answer_fields import Sampling
from medusa_cli.serve.answer_format import AnswerFormat, sse
from medusa_cli.serve.calls import CallReader, in_order
from medusa_cli.serve.chats import ChatRequest, named_tool
from medusa_cli.serve.openai_format import stop_string_of
from medusa_cli.serve.refusals import Refusal
from medusa_cli.serve.scheduler import Event, Ticket
from medusa_cli.serve.schema import (
    MAX_STOPS,
    MAX_TOOLS,
    THOUGHTS,
    Content,
    JsonObject,
    StopText,
    Strict,
    text_of,
    type_of,
    without_types,
)

# Field names of /v1/messages, by the equivalent fields of chats.
FIELDS = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "parallel_tool_calls": "tool_choice",
}
# Types of blocks that the model does not read: thoughts, and blocks of tools that only their provider could run.
DROPPED = (*THOUGHTS, "server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload")
PING = sse({"type": "ping"}, "ping")


class Block(Strict):
    """A block of text in a message's content."""

    place = "messages[].content[]."
    type: Literal["text"]
    text: str


class CallBlock(Strict):
    """A past call of a tool."""

    place = "messages[].content[]."
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject = {}


def _served_blocks(blocks: Any) -> Any:
    """Returns the blocks that the model reads; raises ValueError for a block that is not served."""
    served = without_types(blocks, Block.place, _is_dropped)
    for block in served if isinstance(served, list) else ():
        if isinstance(block, dict) and type_of(block) not in ("text", "tool_use", "tool_result"):
            raise ValueError(
                f"a block has the type {shown(type_of(block))}, which is not served; "
                "send text, tool_use and tool_result blocks"
            )
    return served


def _is_dropped(kind: Any) -> bool:
    return kind in DROPPED or (kind != "tool_result" and str(kind).endswith("_tool_result"))


class ResultBlock(Strict):
    """The result of a past call."""

    place = "messages[].content[]."
    type: Literal["tool_result"]
    tool_use_id: str
    content: Content[Block] = ""
    is_error: bool = False

    _served = field_validator("content", mode="before")(_served_blocks)


AnyBlock = Annotated[
    Annotated[Block, Tag("<text>")]
    | Annotated[CallBlock, Tag("<tool_use>")]
    | Annotated[ResultBlock, Tag("<tool_result>")],
    Discriminator(lambda value: f"<{type_of(value)}>"),
]


class Turn(Strict):
    """A turn of a conversation."""

    place = "messages[]."
    role: Literal["user", "assistant", "system"]
    content: Content[AnyBlock]

    _served = field_validator("content", mode="before")(_served_blocks)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Returns the turn as messages of a chat, in which results of tools are separate messages."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        messages: list[dict[str, Any]] = []
        texts: list[Block] = []
        calls = []
        for block in self.content:
            if isinstance(block, Block):
                texts.append(block)
            elif isinstance(block, CallBlock):
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "function": function})
            else:
                result = {"tool_call_id": block.tool_use_id, "content": text_of(block.content)}
                messages.append({"role": "tool", **result})
        if texts or calls or not messages:
            messages.append({"role": self.role, "content": text_of(texts)})
        if calls:
            messages[-1]["tool_calls"] = calls
        return messages


class InputTool(Strict):
    """A tool that the client runs."""

    place = "tools[]."
    type: Literal["custom"] = "custom"
    name: str
    description: str = ""
    input_schema: JsonObject

    @property
    def function(self) -> dict[str, Any]:
        """Returns the tool in the form of OpenAI's API."""
        return {"name": self.name, "description": self.description, "parameters": self.input_schema}


class Choice(Strict):
    """The value of `tool_choice`: whether the answer calls a tool, and which tool."""

    place = "tool_choice."
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Strict):
    """The form of the answer."""

    place = "output_config.format."
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    place = "output_config."
    format: OutputFormat | None = None


class MessagesRequest(Sampling):
    """The body of /v1/messages. Thinking is always off."""

    unserved = neutral.REQUEST
    messages: Annotated[list[Turn], Field(fail_fast=True)] = Field(min_length=1)
    system: Content[Block] = ""
    max_tokens: int | None = Field(None, ge=1)
    stop_sequences: list[StopText] = Field([], max_length=MAX_STOPS)
    tools: list[InputTool] = Field([], max_length=MAX_TOOLS)
    tool_choice: Choice = Choice(type="auto")
    output_config: OutputConfig = OutputConfig()

    @field_validator("tools", mode="before")
    @classmethod
    def _own(cls, tools: Any) -> Any:
        """Returns the tools that the client runs; leaves out and notes the provider's tools."""
        return without_types(
            tools, InputTool.place, lambda kind: isinstance(kind, str) and kind != "custom"
        )

    def chat(self) -> ChatRequest:
        """Returns the equivalent chat request; raises ValidationError for an invalid combination of fields."""
        shared = {*Sampling.model_fields} & self.model_fields_set
        body = self.model_dump(include=shared, by_alias=True)
        system = text_of(self.system)
        messages = [{"role": "system", "content": system}] if system else []
        for turn in self.messages:
            messages += turn.messages
        last = messages[-1]
        body |= {
            "messages": messages,
            "max_tokens": self.max_tokens,
            "stop": [*self.stop_strings, *self.stop_sequences],
            "tools": [{"type": "function", "function": tool.function} for tool in self.tools],
            "tool_choice": {"any": "required", "tool": named_tool(self.tool_choice.name or "")}.get(
                self.tool_choice.type, self.tool_choice.type
            ),
            # The answer continues a text that the client has begun.
            "continue_final_message": last["role"] == "assistant"
            and bool(last["content"])
            and "tool_calls" not in last,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        if self.tool_choice.disable_parallel_tool_use is not None:
            body["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.output_config.format is not None:
            schema = {"schema": self.output_config.format.schema_}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return ChatRequest(**body)


class MessagesFormat(AnswerFormat):
    """Formats the answer to one request as content blocks, and as the events that announce the blocks."""

    keep_alive = PING

    def __init__(self, backbone: Backbone, chat: ChatRequest, ticket: Ticket) -> None:
        super().__init__(ticket)
        self._backbone = backbone
        self._stops = chat.stop_strings
        self._calls = CallReader(chat.offered_names)
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": chat.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        # The blocks of the answer; the input of a call is kept as a text.
        self._blocks: list[dict[str, Any]] = []

    def whole(self) -> dict[str, Any]:
        self._add(self._ticket.answer.text, last=True)
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = _input_of(block["input"])
        return {
            **self._message,
            "content": self._blocks or [{"type": "text", "text": ""}],
            **self._stop(),
            "usage": self._usage(),
        }

    def begin(self) -> list[str]:
        tokens = len(self._ticket.request.prompt)
        usage = {"input_tokens": tokens, "output_tokens": 0}
        return [_event("message_start", message={**self._message, "usage": usage}), PING]

    def read(self, event: Event) -> list[str]:
        events = self._add(event.text, event.last)
        if event.last:
            if self._blocks:
                events.append(_event("content_block_stop", index=len(self._blocks) - 1))
            events.append(_event("message_delta", delta=self._stop(), usage=self._usage()))
            events.append(_event("message_stop"))
        return events

    def failed(self, reason: Refusal) -> str:
        return sse(reason.body_for("/messages"), "error")

    def _add(self, text: str, last: bool) -> list[str]:
        """Adds text to the blocks; returns the events of a stream."""
        events: list[str] = []
        for kind, part in in_order(self._calls.feed(text, last)):
            if kind == "call":
                block = {"id": part["id"], "name": part["function"]["name"], "input": ""}
                events += self._open({"type": "tool_use", **block})
                continue
            field = "text" if kind == "content" else "input"
            if field == "text" and not (self._blocks and self._blocks[-1]["type"] == "text"):
                events += self._open({"type": "text", "text": ""})
            self._blocks[-1][field] += part
            delta = {"type": "text_delta", "text": part}
            if field == "input":
                delta = {"type": "input_json_delta", "partial_json": part}
            events.append(_event("content_block_delta", index=len(self._blocks) - 1, delta=delta))
        return events

    def _open(self, block: dict[str, Any]) -> list[str]:
        """Closes the previous block, if any, and opens another; returns the events."""
        index = len(self._blocks)
        events = [_event("content_block_stop", index=index - 1)] if index else []
        self._blocks.append(block)
        empty = {**block, "input": {}} if "input" in block else block
        return [*events, _event("content_block_start", index=index, content_block=empty)]

    def _stop(self) -> dict[str, Any]:
        """Returns the reason why the answer ended, and its stop string."""
        answer = self._ticket.answer
        sequence = None
        reason = "max_tokens"
        if answer.finish_reason == "stop":
            sequence = stop_string_of(self._backbone, answer, self._stops)
            reason = "end_turn" if sequence is None else "stop_sequence"
            if self._calls.count:
                reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, int]:
        """Returns the token counts; the cached tokens of the prompt are counted separately."""
        cached = self._ticket.reused
        return {
            "input_tokens": len(self._ticket.request.prompt) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._ticket.answer.stats.tokens,
        }


def _input_of(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call as an object; an empty object if the text is not a JSON object."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _event(name: str, /, **fields: Any) -> str:
    return sse({"type": name, **fields}, name)
