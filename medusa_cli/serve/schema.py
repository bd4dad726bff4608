"""The parts that the bodies of requests share: limits, fields that have several forms, and fields that are not served.

An unknown field is ignored and named in the log and in a header of the response. If a field is known to change the
answer and is not served, the request is refused, and the refusal names the field (see `neutral`).
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from medusa_cli.serve import neutral

# Limits for the contents of one request, so that its preparation does not delay other requests.
MAX_STOPS = 1024
MAX_STOP = 1024
MAX_CHOICES = 128
MAX_NAME = 256
MAX_TOOLS = 128
MAX_TOP = 20
# A field that has several forms is validated in the form in which it was sent. Refusals omit these
# names of forms.
TEXT, LIST, TEXTS, LISTS, OBJECT = FORMS = "<text>", "<list>", "<texts>", "<lists>", "<object>"
ITEMS = "<message>", "<function_call>", "<function_call_output>"
BLOCKS = TEXT, "<tool_use>", "<tool_result>"
FORM = Discriminator(lambda value: LIST if isinstance(value, list) else TEXT)
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]
TokenId = Annotated[int, Field(ge=0)]
# A list of 100,000 wrong items would take seconds to report, so validation ends at the first wrong item.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


def check_json(value: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for values that Python's parser accepts but JSON cannot hold, such as NaN."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as reason:
        raise ValueError("is nested too deep") from reason
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]
Form = TypeVar("Form")  # a part that chats and responses write differently


class Strict(BaseModel):
    """Refuses fields that would change the answer and are not served, and booleans in place of numbers.

    A field that is null counts as omitted, because clients send back what they received. All
    other unknown fields are ignored and noted. unserved: the fields that are refused unless their value
    changes nothing. place: the path of the object in a request.
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
        checks = {name: check for name, check in cls.unserved.items() if name in given}
        unset = {name for name, check in checks.items() if check(given[name], given)}
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


class NamedSchema(Strict):
    """A JSON schema with a name, enforced whether `strict` is set or not. Without a schema, any object is valid."""

    place = "json_schema."
    name: str | None = Field(default=None, max_length=MAX_NAME)
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


Content = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[Form], Field(fail_fast=True), Tag(LIST)], FORM
]


# Types of the parts of past answers that the model does not read.
THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")


class TextPart(Strict):
    """A text in a message's content, with the type that chats or responses give it."""

    place = "messages[].content[]."
    type: Literal["text", "input_text", "output_text"]
    text: str


def type_of(item: Any) -> Any:
    """Returns the `type` of an item, which is a dict or a validated model."""
    return item.get("type") if isinstance(item, dict) else getattr(item, "type", None)


def without_types(items: Any, place: str, ignored: Callable[[Any], bool]) -> Any:
    """Returns a list without the items of ignored types, and notes these types."""
    if not isinstance(items, list):
        return items
    kinds = [type_of(item) for item in items]
    neutral.note(f"{place}type={kind}" for kind in kinds if ignored(kind))
    return [item for item, kind in zip(items, kinds, strict=True) if not ignored(kind)]


def readable(content: Any) -> Any:
    """Returns a message's content with refusals as texts, and without the thoughts of past answers."""
    parts = without_types(content, TextPart.place, THOUGHTS.__contains__)
    if not isinstance(parts, list):
        return parts
    return [
        {"type": "text", "text": part.get("refusal")} if type_of(part) == "refusal" else part
        for part in parts
    ]


def text_of(content: str | list[Any]) -> str:
    """Returns the text of a message's content, with its parts joined."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
