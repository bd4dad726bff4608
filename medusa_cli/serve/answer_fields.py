"""The fields of all requests for an answer, as OpenAI, vLLM and llama.cpp name them: sampling, stops, grammars."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from medusa_cli.decode.grammar import ANY_OBJECT, Grammar
from medusa_cli.errors import UsageError
from medusa_cli.serve import neutral
from medusa_cli.serve.schema import (
    FORM,
    LIST,
    MAX_CHOICES,
    MAX_STOPS,
    MAX_TOP,
    OBJECT,
    TEXT,
    NamedSchema,
    StopText,
    Strict,
    TokenId,
)

# Limits of a request: the characters of all stop strings together, the numbers of stop token ids and of logit biases,
# the characters of a grammar or JSON schema, and the absolute value of a bias.
MAX_ALL_STOPS = 32_768
MAX_STOP_IDS = 1024
MAX_BIASES = 4096
MAX_GRAMMAR = 262_144
MAX_BIAS = 100
BiasKey = Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1)]


def check_biases(value: Any) -> Any:
    """Raises ValueError for a logit bias with too many entries, before the entries are validated."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value):,} entries; use at most {MAX_BIASES:,}")
    return value


class StreamOptions(Strict):
    """Options for streams.

    include_usage: end the stream with a chunk that has the usage and no choice. continuous_usage_stats: with
    include_usage, every chunk also has the usage up to that chunk.
    """

    place = "stream_options."
    include_usage: bool = False
    continuous_usage_stats: bool = False


# Keyword arguments of `Grammar.of`.
Source = dict[str, Any]
Schema = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[dict[str, Any], Tag(OBJECT)],
    Discriminator(lambda value: TEXT if isinstance(value, str) else OBJECT),
]
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]


def choice_of(texts: Sequence[str]) -> str:
    """Returns a Lark grammar that allows exactly one of the given texts."""
    return "start: " + " | ".join(json.dumps(text) for text in texts)


class ResponseFormat(Strict):
    """The form of the answer: any text, any JSON object, or JSON that follows a schema.

    schema (as in llama.cpp's API): with the type json_object, the schema that the object must follow.
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
        """Returns the arguments of `Grammar.of` for the answer; None if any text is allowed."""
        if self.type == "text":
            return None
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        return {"json_schema": ANY_OBJECT if schema is None else schema}


class StructuredOutputs(Strict):
    """A constraint on the answer, under vLLM's field names. Only one of the fields may be given."""

    place = "structured_outputs."
    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    @property
    def source(self) -> Source:
        """Returns the arguments of `Grammar.of`; raises UsageError if both a choice and a grammar are given."""
        if self.choice and self.grammar:
            raise UsageError("@choice and @grammar constrain one answer", "leave one of them out")
        schema = ANY_OBJECT if self.json_object and self.json_ is None else self.json_
        grammar = choice_of(self.choice) if self.choice else self.grammar
        return {"json_schema": schema, "regex": self.regex, "grammar": grammar}


class Speculative(Strict):
    """Says whether an answer uses drafts, and whether the usage reports figures about them.

    enabled: false means plain decoding. figures: report in the usage how many draft tokens were accepted at each
    position.
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
    """Returns a logit bias as a dict from token ids (int) or texts (str) to biases.

    Accepts OpenAI's and llama.cpp's forms: a dict from ids or texts, or a list of pairs. The bias False bans a token.
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
    # Fields of vLLM and llama.cpp; null means the model's default.
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
        """Returns the stop strings without empty strings, which clients send to mean no stop string."""
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
            fault = f"stop has {length:,} characters in all; use at most {MAX_ALL_STOPS:,}"
            raise ValueError(fault)
        return self

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def forms(self) -> dict[str, Source]:
        """Returns, for each field that constrains the answer, the arguments of `Grammar.of`.

        Raises UsageError if structured_outputs has both a choice and a grammar.
        """
        forms: dict[str, Source] = {}
        if self.structured_outputs is not None:
            forms["structured_outputs"] = self.structured_outputs.source
        for field, kind in FORM_FIELDS.items():
            if (value := getattr(self, field)) is not None:
                forms[field] = {kind: choice_of(value) if field == "guided_choice" else value}
        return forms

    @property
    def constraint(self) -> str:
        """Returns the name of the field that constrains the answer; "structured_outputs" if no field does."""
        given = [field for field in FORM_FIELDS if getattr(self, field) is not None]
        return given[0] if given and self.structured_outputs is None else "structured_outputs"

    @property
    def chosen_temperature(self) -> float | None:
        """Returns the temperature that the request asks for, None for the default."""
        if self.do_sample is False:
            return 0.0
        return 1.0 if self.do_sample and self.temperature is None else self.temperature

    @property
    def followed(self) -> Grammar | None:
        """Returns the grammar that the answer must follow, if any; raises UsageError if two fields disagree."""
        grammars = {field: Grammar.of(**source) for field, source in self.forms.items()}
        first = next(iter(grammars), None)
        for field, grammar in grammars.items():
            if not _alike(grammar, grammars[str(first)]):
                fault = f"{first} and {field} constrain one answer in different ways"
                raise UsageError(fault, "leave one of them out")
        return None if first is None else grammars[first]


class Sampled(Sampling):
    """The fields that only chats and completions have: the number of answers, and outputs besides the text."""

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
    """Returns True for equal JSON schemas, and for grammars whose texts differ only in white space."""
    if first is None or second is None or first.kind != second.kind:
        return first == second
    if first.kind == "json_schema":
        return bool(json.loads(first.text) == json.loads(second.text))
    return first.text.split() == second.text.split()


# Former fields of vLLM, and fields of llama.cpp and SGLang, with the kind of grammar that each field contains.
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
