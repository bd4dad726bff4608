"""Request bodies, with the field names of OpenAI, vLLM and llama.cpp.

An unknown field is ignored and named in the log and in a header. Fields that are known to change the
answer and are not served are refused by name (see `neutral`).
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from medusa_cli.decode.grammar import ANY_OBJECT, Grammar
from medusa_cli.errors import UsageError
from medusa_cli.serve import neutral

# Limits on what one request may hold, so that preparing it does not hold up others: the number of
# stop strings, the characters of each and of all, end tokens, biases, and the characters of a
# grammar or JSON schema.
MAX_STOPS = 1024
MAX_STOP = 1024
MAX_ALL_STOPS = 32_768
MAX_STOP_IDS = 1024
MAX_BIASES = 4096
MAX_GRAMMAR = 262_144
MAX_CHOICES = 128
MAX_NAME = 256
MAX_TOOLS = 128
MAX_TOP = 20
MAX_BIAS = 100
# A field that has several forms is validated in the form in which it was sent. Refusals omit these
# names of forms.
TEXT, LIST, TEXTS, LISTS, OBJECT = FORMS = "<text>", "<list>", "<texts>", "<lists>", "<object>"
ITEMS = "<message>", "<function_call>", "<function_call_output>"
BLOCKS = TEXT, "<tool_use>", "<tool_result>"
FORM = Discriminator(lambda value: LIST if isinstance(value, list) else TEXT)
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]
BiasKey = Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
# A list of 100,000 wrong items would take seconds to report, so validation ends at the first.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


def check_json(value: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for what Python's parser accepts but JSON cannot hold, such as NaN."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as reason:
        raise ValueError("is nested too deep") from reason
    return value


def check_biases(value: Any) -> Any:
    """Raises ValueError for too many entries, before each of them is validated."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value):,} entries; use at most {MAX_BIASES:,}")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]
Form = TypeVar("Form")  # a part that chats and responses write differently


class Strict(BaseModel):
    """Refuses fields that would change the answer and are not served, and booleans in place of numbers.

    A field that is null counts as omitted, because clients send back what they received. Other
    unknown fields are ignored and noted. unserved: the fields that are refused unless their value
    changes nothing. place: the place of the object in a request.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unserved: ClassVar[neutral.Table] = {}
    place: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        unset = {
            name
            for name, check in cls.unserved.items()
            if name in given and check(given[name], given)
        }
        for first, *others in _alternatives_of(cls):
            unset |= {name for name in others if name in given and given[name] == given.get(first)}
        known = {*_names_of(cls), *cls.unserved}
        neutral.note(cls.place + name for name in given if name not in known)
        return {name: value for name, value in given.items() if name in known and name not in unset}


@cache
def _alternatives_of(model: type[BaseModel]) -> list[list[str]]:
    """Returns the names by which each field of a model may be given."""
    names = []
    for name, field in model.model_fields.items():
        choices = field.validation_alias
        if isinstance(choices, AliasChoices):
            names.append([str(choice) for choice in choices.choices])
        else:
            names.append([str(choices or field.alias or name)])
    return names


@cache
def _names_of(model: type[BaseModel]) -> frozenset[str]:
    """Returns the names by which the fields of a model may be given."""
    return frozenset(name for names in _alternatives_of(model) for name in names)


class StreamOptions(Strict):
    """Options for streams.

    include_usage: send a last chunk with the usage and no choice. continuous_usage_stats: then also send the usage so
    far in each chunk.
    """

    place = "stream_options."
    include_usage: bool = False
    continuous_usage_stats: bool = False


class NamedSchema(Strict):
    """A JSON schema with a name, enforced whether `strict` is set or not. Without a schema, any object is valid."""

    place = "json_schema."
    name: str | None = Field(default=None, max_length=MAX_NAME)
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


# Keyword arguments of `Grammar.of`.
Source = dict[str, Any]
Schema = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[dict[str, Any], Tag(OBJECT)],
    Discriminator(lambda value: TEXT if isinstance(value, str) else OBJECT),
]
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]


def choice_of(texts: Sequence[str]) -> str:
    """Returns the grammar of a choice between texts."""
    return "start: " + " | ".join(json.dumps(text) for text in texts)


class ResponseFormat(Strict):
    """The form of the answer: any text, any JSON object, or JSON that follows a schema.

    schema: the schema of a JSON object, as in llama.cpp's API.
    """

    place = "response_format."
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _agree(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema and the type json_schema belong together")
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("schema and the type json_object belong together")
        return self

    @property
    def source(self) -> Source | None:
        """Returns the arguments of `Grammar.of` for the answer; None for any text."""
        if self.type == "text":
            return None
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        return {"json_schema": ANY_OBJECT if schema is None else schema}


class StructuredOutputs(Strict):
    """A constraint on the answer, with vLLM's field names, of which only one may be given."""

    place = "structured_outputs."
    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    @property
    def source(self) -> Source:
        """Returns the arguments of `Grammar.of` for the answer; raises UsageError for both a choice and a grammar."""
        if self.choice and self.grammar:
            raise UsageError("@choice and @grammar constrain one answer", "leave one of them out")
        schema = ANY_OBJECT if self.json_object and self.json_ is None else self.json_
        return {
            "json_schema": schema,
            "regex": self.regex,
            "grammar": choice_of(self.choice) if self.choice else self.grammar,
        }


class Speculative(Strict):
    """Controls whether an answer uses drafts, and whether the usage has figures about them.

    enabled: false means plain decoding. figures: report the number of accepted draft tokens at each
    position in the usage.
    """

    place = "speculative."
    enabled: bool = True
    figures: bool = False


class Common(Strict):
    """The fields of all requests for an answer."""

    unserved = neutral.REQUEST
    model: str | None = Field(None, description="default: the only model there is")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    speculative: Annotated[
        Annotated[bool, Tag(TEXT)] | Annotated[Speculative, Tag(OBJECT)],
        Discriminator(lambda value: OBJECT if isinstance(value, dict | Speculative) else TEXT),
    ] = Field(
        True, description="false: plain decoding. The answer is the same; not in OpenAI's API"
    )
    record: bool = Field(
        True, description="false: leaves the request out of the file of --record, if there is one"
    )

    @property
    def drafts(self) -> Speculative:
        given = self.speculative
        return given if isinstance(given, Speculative) else Speculative(enabled=given)


def _bias_by_token(value: Any) -> Any:
    """Returns a logit bias as a dict by token id (int) or text (str), from the forms of OpenAI and llama.cpp.

    Those are a dict by id or text, and a list of pairs. False bans a token.
    """
    pairs: Any = value
    if isinstance(value, Mapping):
        pairs = [
            (int(key) if isinstance(key, str) and key.isdecimal() else key, bias)
            for key, bias in value.items()
        ]
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        return value
    if not all(isinstance(key, str | int) for key, _ in pairs):
        return value
    return {key: -MAX_BIAS if bias is False else bias for key, bias in pairs}


class Sampling(Common):
    """The fields of chats, completions and responses: sampling, stop criteria and the form of the answer."""

    do_sample: bool | None = Field(None, description="false: greedy, whatever the temperature")
    top_k: int | None = Field(
        None, ge=0, le=1_000_000, description="0 keeps all; not in OpenAI's API"
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: (
        Annotated[
            Annotated[StopText, Tag(TEXT)]
            | Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag(LIST)],
            FORM,
        ]
        | None
    ) = None
    presence_penalty: float = Field(0, ge=-2, le=2)
    frequency_penalty: float = Field(0, ge=-2, le=2)
    logit_bias: (
        Annotated[
            dict[BiasKey, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
            BeforeValidator(check_biases),
            BeforeValidator(_bias_by_token),
        ]
        | None
    ) = None
    # Fields of vLLM and llama.cpp, where null means the model's default.
    repetition_penalty: float | None = Field(
        None, gt=0, le=100, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    no_repeat_ngram_size: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(
        None, ge=0, validation_alias=AliasChoices("min_tokens", "min_new_tokens")
    )
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool = Field(
        False, validation_alias=AliasChoices("include_stop_str_in_output", "no_stop_trim")
    )
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="the prompt's last tokens; -1: all that fit"
    )
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, description="in Lark's form, or GBNF")
    json_schema: Schema | None = None
    grammar: str | None = Field(None, description="in GBNF, or Lark's form")
    regex: str | None = None
    ebnf: str | None = Field(None, description="like grammar")

    @field_validator("stop", mode="before")
    @classmethod
    def _without_empty(cls, stop: Any) -> Any:
        """Returns the stop strings without empty ones, which clients send for none."""
        if isinstance(stop, list):
            return [text for text in stop if text != ""]
        return None if stop == "" else stop

    @model_validator(mode="after")
    def _whole_prompt(self) -> "Sampling":
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens is 0; use 1 or more, or -1")
        return self

    @model_validator(mode="after")
    def _bounded(self) -> "Sampling":
        length = sum(map(len, self.stop_strings))
        if length > MAX_ALL_STOPS:
            raise ValueError(
                f"stop has {length:,} characters in all; use at most {MAX_ALL_STOPS:,}"
            )
        return self

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def forms(self) -> dict[str, Source]:
        """Returns the arguments of `Grammar.of` for the answer, by the field that gives them; raises UsageError."""
        forms: dict[str, Source] = {}
        if self.structured_outputs is not None:
            forms["structured_outputs"] = self.structured_outputs.source
        for field, kind in FORM_FIELDS.items():
            if (value := getattr(self, field)) is not None:
                forms[field] = {kind: choice_of(value) if field == "guided_choice" else value}
        return forms

    @property
    def constraint(self) -> str:
        """Returns the name of the field that constrains the answer, "structured_outputs" if none does."""
        fields = ("structured_outputs", *FORM_FIELDS)
        return next(
            (field for field in fields if getattr(self, field) is not None), "structured_outputs"
        )

    @property
    def chosen_temperature(self) -> float | None:
        """Returns the temperature that the request asks for, None for the default."""
        if self.do_sample is False:
            return 0.0
        return 1.0 if self.do_sample and self.temperature is None else self.temperature

    @property
    def followed(self) -> Grammar | None:
        """Returns the grammar that the answer must follow, if any; raises UsageError if several differ."""
        grammars = {field: Grammar.of(**source) for field, source in self.forms.items()}
        first = next(iter(grammars), None)
        for field, grammar in grammars.items():
            if not _alike(grammar, grammars[str(first)]):
                raise UsageError(
                    f"{first} and {field} constrain one answer in different ways",
                    "leave one of them out",
                )
        return None if first is None else grammars[first]


class Sampled(Sampling):
    """The fields that only chats and completions have: several answers, and what is reported beside their text."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    return_token_ids: bool = False
    echo: bool = False
    return_progress: bool = Field(False, description="tell in streams how far the prompt is")

    @model_validator(mode="after")
    def _reported_whole(self) -> "Sampled":
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs needs stream to be false")
        return self


def _alike(first: Grammar | None, second: Grammar | None) -> bool:
    """Returns True for grammars of the same text, or of equal JSON schemas."""
    if first is None or second is None or first.kind != second.kind:
        return first == second
    if first.kind == "json_schema":
        return bool(json.loads(first.text) == json.loads(second.text))
    return first.text.split() == second.text.split()


# Former fields of vLLM, and fields of llama.cpp and SGLang, with the kind of grammar that each contains.
FORM_FIELDS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "grammar",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}
Content = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[Form], Field(fail_fast=True), Tag(LIST)], FORM
]


# Parts of past answers that are no text for the model.
THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")


class TextPart(Strict):
    """A part of a message's content. Past answers may hold the parts of responses, too."""

    place = "messages[].content[]."
    type: Literal["text", "input_text", "output_text"]
    text: str


def readable(content: Any) -> Any:
    """Returns a message's content with refusals as texts, and without the thoughts of past answers."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in THOUGHTS:
            neutral.note([f"{TextPart.place}type={kind}"])
        elif kind == "refusal":
            parts.append({"type": "text", "text": part.get("refusal")})
        else:
            parts.append(part)
    return parts


def text_of(content: str | list[Any]) -> str:
    """Returns the text of a message's content, with its parts joined."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Function(Strict):
    """A function that the model may call."""

    place = "tools[].function."
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments")


def functions_of(tools: Any) -> Any:
    """Returns the functions among tools; those that only their provider could run are ignored and noted."""
    if not isinstance(tools, list):
        return tools
    functions = []
    for tool in tools:
        kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
        if isinstance(kind, str) and kind != "function":
            neutral.note([f"{Tool.place}type={kind}"])
        else:
            functions.append(tool)
    return functions


class Tool(Strict):
    """A tool of the only supported type."""

    place = "tools[]."
    type: Literal["function"]
    function: Function

    @property
    def plain(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect."""
        function = self.function
        parameters = function.parameters or {"type": "object", "properties": {}}
        more = {
            "name": function.name,
            "description": function.description,
            "parameters": parameters,
        }
        return {"type": "function", "function": more}


class CalledFunction(Strict):
    """A function that an answer called. If the end of the answer cut off its arguments, they are not valid JSON."""

    place = "messages[].tool_calls[].function."
    name: str
    arguments: Any = Field("", description="a text, or a JSON object")

    @field_validator("arguments")
    @classmethod
    def _text_or_object(cls, arguments: Any) -> Any:
        if not isinstance(arguments, str | dict):
            raise ValueError("neither a text nor a JSON object")
        return arguments

    @property
    def plain(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates expect; arguments that are not a JSON object stay text."""
        try:
            # Clients send an empty text for a call without arguments.
            value = (
                self.arguments
                if isinstance(self.arguments, dict)
                else json.loads(self.arguments or "{}")
            )
        except (ValueError, RecursionError):
            value = None
        return {
            "name": self.name,
            "arguments": value if isinstance(value, dict) else self.arguments,
        }


class ToolCall(Strict):
    """A call in an earlier answer."""

    place = "messages[].tool_calls[]."
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionName(Strict):
    place = "tool_choice.function."
    name: str


class NamedTool(Strict):
    """The choice of one tool."""

    place = "tool_choice."
    type: Literal["function"]
    function: FunctionName


class ToolSubset(Strict):
    """The tools that an answer may call, or with the mode "required" must call."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedTools(Strict):
    """The choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


Subset = TypeVar("Subset")


def _form_of_choice(value: Any) -> str:
    if isinstance(value, str):
        return TEXT
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return LIST if kind == "allowed_tools" else OBJECT


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)]
    | Annotated[Form, Tag(OBJECT)]
    | Annotated[Subset, Tag(LIST)],
    Discriminator(_form_of_choice),
]


class Message(Strict):
    """A turn of a conversation. refusal: used if there is no content. function_call: a call in OpenAI's old format."""

    place = "messages[]."
    unserved = {"reasoning": neutral.beside("reasoning_content")}
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content[TextPart] | None = None
    reasoning_content: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None
    name: str | None = None

    _readable = field_validator("content", mode="before")(readable)

    @model_validator(mode="after")
    def _agree(self) -> "Message":
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError("content is missing")
        if (self.tool_calls or self.function_call) and self.role != "assistant":
            raise ValueError("tool_calls belong to the role assistant")
        if self.tool_call_id is None and self.role == "tool":
            raise ValueError("the role tool needs tool_call_id")
        return self

    @property
    def is_system(self) -> bool:
        return self.role in ("system", "developer")

    @property
    def plain(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates expect."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {
            "role": role,
            "content": text_of(self.content or self.refusal or ""),
        }
        if role == "tool":
            name = {} if self.name is None else {"name": self.name}
            return {**message, "tool_call_id": self.tool_call_id or "", **name}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        calls = [(call.id, call.function.plain) for call in self.tool_calls or ()]
        if self.function_call is not None:
            calls.append(("", self.function_call.plain))
        if calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": function} for id, function in calls
            ]
        return message


class TemplateOptions(Strict):
    """Variables of the chat template.

    thinking, reasoning: other forms of enable_thinking and reasoning_effort.
    """

    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="more variables for the chat template"
    )
    enable_thinking: bool | None = Field(
        None, validation_alias=AliasChoices("enable_thinking", "think")
    )
    thinking: Any = None
    reasoning_effort: str | None = Field(None, pattern=r"^[\w-]{1,32}$")
    reasoning: Any = None

    @property
    def variables(self) -> dict[str, Any]:
        """Returns the variables of the chat template that the request sets."""
        given = self.thinking
        thinking = given if isinstance(given, bool) else None
        if isinstance(given, dict):
            thinking = given.get("type") != "disabled"
        effort = self.reasoning_effort
        if effort is None and isinstance(self.reasoning, dict):
            asked = self.reasoning.get("effort")
            effort = asked if isinstance(asked, str) else None
        if effort == "none" and thinking is None:
            thinking = False
        if self.enable_thinking is not None:
            thinking = self.enable_thinking
        variables = {"enable_thinking": thinking, "reasoning_effort": effort}
        own = {name: value for name, value in variables.items() if value is not None}
        return {**own, **self.chat_template_kwargs}


class Conversation(TemplateOptions):
    """Messages, and the options for rendering them with the chat template."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    documents: list[dict[str, Any]] | None = None
    add_special_tokens: bool = Field(
        False, description="put the tokenizer's own before the prompt, too"
    )
    continue_final_message: bool = Field(
        False, description="the answer goes on with the last message"
    )
    add_generation_prompt: bool | None = Field(
        None, description="default: true unless the last message goes on"
    )

    _functions = field_validator("tools", mode="before")(functions_of)

    @model_validator(mode="after")
    def _one_way_on(self) -> "Conversation":
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self

    @property
    def template(self) -> dict[str, Any]:
        """Returns the arguments of the chat template."""
        new = (
            not self.continue_final_message
            if self.add_generation_prompt is None
            else self.add_generation_prompt
        )
        ways = {"add_generation_prompt": new, "continue_final_message": self.continue_final_message}
        documents = {"documents": self.documents} if self.documents else {}
        return {**self.variables, **documents, **ways}

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Returns the tools that the model is told about."""
        return [tool.plain for tool in self.tools or ()]


class ChatRequest(Sampled, Conversation):
    """The body of /v1/chat/completions."""

    unserved = neutral.CHAT
    max_tokens: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("max_tokens", "n_predict", "max_new_tokens")
    )
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    response_format: ResponseFormat = ResponseFormat()
    tool_choice: ToolChoice[NamedTool, AllowedTools] | None = None
    parallel_tool_calls: bool | None = Field(
        None, description="false: at most one call; default: one if a call is required, else any"
    )

    @model_validator(mode="after")
    def _agree(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; leave one of them out")
        names = {tool.function.name for tool in self.tools or ()}
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice needs tools")
        for name in self._chosen:
            if name not in names:
                raise ValueError(f"tool_choice {name!r} is none of the tools")
        return self

    @property
    def _chosen(self) -> list[str]:
        """Returns the names of the tools that tool_choice lists."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return [tool.function.name for tool in choice.allowed_tools.tools]
        return [choice.function.name] if isinstance(choice, NamedTool) else []

    @property
    def offered(self) -> list[dict[str, Any]]:
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, AllowedTools):
            return [tool for tool in super().offered if tool["function"]["name"] in self._chosen]
        return super().offered

    @property
    def required(self) -> list[dict[str, Any]]:
        """Returns the tools of which the answer must call one; an empty list if no call is required."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [tool for tool in self.offered if tool["function"]["name"] in self._chosen]
        if isinstance(choice, AllowedTools):
            choice = choice.allowed_tools.mode
        return self.offered if choice == "required" else []

    @property
    def constraint(self) -> str:
        if self.required:
            return "tools"
        return super().constraint if self.response_format.type == "text" else "response_format"

    @property
    def forms(self) -> dict[str, Source]:
        source = self.response_format.source
        return {**({} if source is None else {"response_format": source}), **super().forms}

    @property
    def echoed(self) -> str:
        """Returns the text that precedes the answer, which is empty without `echo`.

        With `echo` it is the last message, if that is an assistant's or if no generation prompt is added.
        """
        last = self.messages[-1]
        own = last.role == "assistant" or not self.template["add_generation_prompt"]
        return text_of(last.content or "") if self.echo and own else ""

    @property
    def limit(self) -> int | None:
        """Returns the maximum length of the answer in tokens."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int | None:
        """Returns how many of the likeliest tokens to report with each token; None for no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _form_of_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return TEXT
    first = value[0] if value else None
    if isinstance(first, str):
        return TEXTS
    return LISTS if isinstance(first, list) else LIST


class CompletionRequest(Sampled):
    """The body of /v1/completions, with texts or lists of token ids to continue."""

    prompt: Annotated[
        Annotated[str, Field(min_length=1), Tag(TEXT)]
        | Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
            Tag(TEXTS),
        ]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES), Tag(LISTS)]
        | Annotated[TokenIds, Tag(LIST)],
        Discriminator(_form_of_prompt),
    ]
    max_tokens: int = Field(
        16,
        ge=-1,
        validation_alias=AliasChoices("max_tokens", "n_predict", "max_new_tokens"),
        description="0 only with echo, -1: up to the server's limit",
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    suffix: str = Field("", description="text after the answer, for models that fill in the middle")
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _agree(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 needs echo to be true")
        if self.suffix and (
            self.echo or not all(isinstance(prompt, str) for prompt in self.prompts)
        ):
            raise ValueError("suffix needs a text as the prompt, and no echo")
        return self

    @property
    def limit(self) -> int | None:
        return None if self.max_tokens < 0 else self.max_tokens

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class TokenizeText(Strict):
    """The body of /tokenize for a text, with the field names of vLLM (prompt) or llama.cpp (content)."""

    unserved = {"parse_special": neutral.only(True)}
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    content: str | None = None
    add_special: bool = False
    with_pieces: bool = False

    @model_validator(mode="after")
    def _one_text(self) -> "TokenizeText":
        if (self.prompt is None) == (self.content is None):
            raise ValueError("give prompt or content, the text to tokenize")
        return self

    @property
    def text(self) -> str:
        return (self.prompt if self.content is None else self.content) or ""

    @property
    def begins(self) -> bool:
        """Returns True if the tokenizer's own special tokens come first."""
        return self.add_special_tokens if self.content is None else self.add_special


class TokenizeChat(Conversation):
    """The body of /tokenize for messages."""

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]

    @property
    def prompts(self) -> Sequence[list[int]]:
        return [self.tokens]


def _form_of_tokenize(body: Any) -> str:
    is_chat = isinstance(body, TokenizeChat) or (isinstance(body, dict) and "messages" in body)
    return LIST if is_chat else TEXT


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag(TEXT)] | Annotated[TokenizeChat, Tag(LIST)],
    Discriminator(_form_of_tokenize),
]
