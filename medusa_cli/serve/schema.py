"""Bodies of requests, in OpenAI's words. A field that has no effect here is refused by name, never ignored."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from medusa_cli.decode.grammar import ANY_OBJECT, Grammar
from medusa_cli.errors import UsageError

# OpenAI allows 4 and 128.
MAX_STOPS, MAX_CHOICES, MAX_NAME, MAX_TOOLS = 16, 128, 256, 128
# A field of several forms is checked in the form it was sent in; refusals leave out these names of forms.
TEXT, LIST, TEXTS, LISTS, OBJECT = FORMS = "<text>", "<list>", "<texts>", "<lists>", "<object>"
ITEMS = "<message>", "<function_call>", "<function_call_output>"
FORM = Discriminator(lambda value: LIST if isinstance(value, list) else TEXT)
StopText = Annotated[str, Field(min_length=1, max_length=256)]
NoList = Annotated[list[Any], Field(max_length=0)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Unused = Annotated[Any, Field(description="taken and not used")]
Form = TypeVar("Form")  # what chats and responses write differently


class Strict(BaseModel):
    """Refuses unknown fields, and true as a number; null means left out, as clients send back what they received."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(Strict):
    """include_usage: send a last chunk with the usage and no choice."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class NamedSchema(Strict):
    """JSON schema with a name; it is followed, strict or not. Without a schema any object will do."""

    name: str | None = Field(default=None, max_length=MAX_NAME)
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: Unused = None
    strict: Unused = None


class ResponseFormat(Strict):
    """Form of the answer: any text, any JSON object, or one by a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _agree(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema and the type json_schema belong together")
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        schema = self.json_schema and self.json_schema.schema_
        return Grammar.of(json_schema=ANY_OBJECT if schema is None else schema)


class StructuredOutputs(Strict):
    """Constraint of the answer in vLLM's words: one of these."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar_: str | None = Field(None, alias="grammar")

    @property
    def grammar(self) -> Grammar | None:
        choice = self.choice and "start: " + " | ".join(json.dumps(text) for text in self.choice)
        if choice and self.grammar_:
            raise UsageError("@choice and @grammar constrain one answer", "leave one of them out")
        return Grammar.of(json_schema=self.json_, regex=self.regex, grammar=choice or self.grammar_)


class Common(Strict):
    """Fields of all requests for an answer."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    user: Unused = None
    metadata: Unused = None
    store: Unused = None
    service_tier: Unused = None


class Sampled(Common):
    """Fields of chats and completions: sampling, stop criteria, forms of the answer."""

    top_k: int | None = Field(None, ge=0, le=1_000_000, description="0 is no cut; not in OpenAI's API")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: (
        Annotated[
            Annotated[StopText, Tag(TEXT)] | Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag(LIST)], FORM
        ]
        | None
    ) = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    presence_penalty: float = Field(0, ge=-2, le=2)
    frequency_penalty: float = Field(0, ge=-2, le=2)
    logit_bias: dict[Annotated[int, Field(ge=0, strict=False)], Annotated[float, Field(ge=-100, le=100)]] | None = None
    # vLLM's; null is the model's own value.
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def constraint(self) -> str:
        """Returns the field that constrains the answer, if any does."""
        return "structured_outputs"

    @property
    def grammar(self) -> Grammar | None:
        """Returns what the answer must follow; raises UsageError."""
        given = self.structured_outputs
        return None if given is None else given.grammar


Content = Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[Form], Tag(LIST)], FORM]


class TextPart(Strict):
    """Part of a message's content."""

    type: Literal["text"]
    text: str


def text_of(content: str | list[Any]) -> str:
    """Returns the text of a content, whose parts stand side by side."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Function(Strict):
    """Function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments")
    strict: Unused = None


class Tool(Strict):
    """Tool of the only type there is."""

    type: Literal["function"]
    function: Function

    @property
    def plain(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates take."""
        function = self.function
        parameters = function.parameters or {"type": "object", "properties": {}}
        more = {"name": function.name, "description": function.description, "parameters": parameters}
        return {"type": "function", "function": more}


class CalledFunction(Strict):
    """Function that an answer called."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _object(cls, text: str) -> str:
        text = text or "{}"  # as clients write a call without arguments
        try:
            value = json.loads(text)
        except RecursionError:
            value = None
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
        return text


class ToolCall(Strict):
    """Call in an answer of the past."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Unused = None


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    """Choice of one tool."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)] | Annotated[Form, Tag(OBJECT)],
    Discriminator(lambda value: TEXT if isinstance(value, str) else OBJECT),
]


class Message(Strict):
    """Turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    annotations: NoList | None = None
    name: Unused = None

    @model_validator(mode="after")
    def _agree(self) -> "Message":
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to the role assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id and the role tool belong together")
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates take."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text_of(self.content or "")}
        if self.role == "tool":
            return {**message, "tool_call_id": self.tool_call_id, **({"name": self.name} if self.name else {})}
        calls = [
            {"id": call.id, "type": "function", "function": {"name": own.name, "arguments": json.loads(own.arguments)}}
            for call in self.tool_calls or ()
            for own in (call.function,)
        ]
        return {**message, "tool_calls": calls} if calls else message


class Conversation(Strict):
    """Messages, and how the chat template renders them."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] = Field({}, description="more variables for the chat template")
    continue_final_message: bool = Field(False, description="the answer goes on with the last message")
    add_generation_prompt: bool | None = Field(None, description="default: true unless the last message goes on")

    @model_validator(mode="after")
    def _one_way_on(self) -> "Conversation":
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self

    @property
    def template(self) -> dict[str, Any]:
        """Returns the arguments of the chat template."""
        new = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        ways = {"add_generation_prompt": new, "continue_final_message": self.continue_final_message}
        return {**self.chat_template_kwargs, **ways}

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Returns the tools that the model is told of."""
        return [tool.plain for tool in self.tools or ()]


class ChatRequest(Sampled, Conversation):
    """Body of /v1/chat/completions."""

    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat = ResponseFormat()
    tool_choice: ToolChoice[NamedTool] | None = None
    parallel_tool_calls: bool = Field(False, description="required calls may be several")
    reasoning_effort: Unused = None
    prediction: Unused = None

    @model_validator(mode="after")
    def _agree(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; leave one of them out")
        if self.structured_outputs is not None and self.response_format.type != "text":
            raise ValueError("response_format and structured_outputs exclude each other")
        names = {tool.function.name for tool in self.tools or ()}
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice {self.tool_choice.function.name!r} is none of the tools")
        return self

    @property
    def offered(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else super().offered

    @property
    def required(self) -> list[dict[str, Any]]:
        """Returns the tools of which the answer must call one; none if it may do without."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.offered if tool["function"]["name"] == self.tool_choice.function.name]
        return self.offered if self.tool_choice == "required" else []

    @property
    def constraint(self) -> str:
        if self.required:
            return "tools"
        return super().constraint if self.response_format.type == "text" else "response_format"

    @property
    def grammar(self) -> Grammar | None:
        return self.response_format.grammar or super().grammar

    @property
    def limit(self) -> int | None:
        """Returns the longest answer in tokens."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int | None:
        """Returns how many of the likeliest tokens to report beside each token; None for no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _form_of_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return TEXT
    first = value[0] if value else None
    return TEXTS if isinstance(first, str) else LISTS if isinstance(first, list) else LIST


class CompletionRequest(Sampled):
    """Body of /v1/completions: texts, or lists of token ids, to continue."""

    prompt: Annotated[
        Annotated[str, Field(min_length=1), Tag(TEXT)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES), Tag(TEXTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES), Tag(LISTS)]
        | Annotated[TokenIds, Tag(LIST)],
        Discriminator(_form_of_prompt),
    ]
    max_tokens: int = Field(16, ge=0, description="0 only with echo")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: Literal[1] = 1
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _agree(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 needs echo to be true")
        return self

    @property
    def limit(self) -> int:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class TokenizeText(Strict):
    """Body of /tokenize with a text, in vLLM's words."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(Conversation):
    """Body of /tokenize with messages."""

    model: str | None = None
    add_special_tokens: Literal[False] = False
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]

    @property
    def prompts(self) -> Sequence[list[int]]:
        return [self.tokens]


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag(TEXT)] | Annotated[TokenizeChat, Tag(LIST)],
    Discriminator(lambda body: LIST if isinstance(body, dict) and "messages" in body else TEXT),
]
