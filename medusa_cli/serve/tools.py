"""Tools: their description in the prompt, and the grammar of their calls.

Models write calls in the style of Hermes and Qwen, of Llama 3, or of Mistral, as the chat template
shows. If the template does not support tools, the system prompt describes them in Hermes' style.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from medusa_cli.decode.grammar import ANY_OBJECT, Grammar, inline, schema_grammar
from medusa_cli.decode.lazy_grammar import LazyGrammar, Trigger
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.serve.calls import MARKERS

MAX_CALLS = 8  # in an answer that must call a tool
# A call without a marker, up to its arguments.
BARE_HEAD = (
    r"[\s,;}}\]]*(?:```[\w-]*\s*)?(?:\[\s*)?\{{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?"
    r"\"name\"\s*:\s*\"{name}\"\s*,\s*\"(?:arguments|parameters)\"\s*:"
)
# Keywords of JSON Schema that describe an object, unless their value is empty.
DESCRIBING = (
    *("properties", "patternProperties", "propertyNames", "required", "minProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$ref", "$dynamicRef"),
    *("$recursiveRef", "anyOf", "oneOf", "allOf", "enum", "const", "if", "not"),
)
INSTRUCTION = """You may call functions to help with the request. These are their signatures:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON, within tags:
<tool_call>
{{"name": "the name", "arguments": {{"parameter": "value"}}}}
</tool_call>"""

# Texts that were logged. Their number is limited, because they contain names that clients choose.
MAX_NOTED = 1000
_noted = set[str]()
log = logging.getLogger(__name__)
Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolStyle:
    """Describes how a model writes calls.

    first, last: the text around all calls. before, after: the text around each call. between: the text between calls.
    call: a call itself. marker: the first text of a call; only a call may follow it.
    """

    marker: str
    first: str = ""
    last: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    call: str = '{"name": NAME, "arguments": ARGUMENTS}'


HERMES = ToolStyle("<tool_call>", before="<tool_call>\n", after="\n</tool_call>", between="\n")
LLAMA = ToolStyle("<|python_tag|>", between="; ", call='{"name": NAME, "parameters": ARGUMENTS}')
MISTRAL = ToolStyle("[TOOL_CALLS]", first="[TOOL_CALLS] [", last="]", between=", ")
MISTRAL_11 = ToolStyle("[TOOL_CALLS]", before="[TOOL_CALLS]", call="BARE[ARGS]ARGUMENTS")


def style_of(template: str) -> ToolStyle:
    """Returns the style in which a model with this chat template writes calls."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL_11 if "[ARGS]" in template else MISTRAL
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return LLAMA
    return HERMES


def marker_ids(backbone: Backbone) -> dict[str, int]:
    """Returns those markers that are tokens of the model, special or not, with their ids."""
    tokens = backbone.tokenizer.added_tokens_decoder
    return {token.content: id for id, token in tokens.items() if token.content in MARKERS}


def calls_grammar(
    backbone: Backbone, tools: Tools, several: bool, answer: Grammar | None = None
) -> Grammar:
    """Returns the grammar of one or more tool calls in the model's style.

    several: allow more than one call. answer: a JSON schema that the answer may follow instead of calling a tool.
    """
    style = style_of(template_of(backbone))
    literal = partial(_literal, marker_ids(backbone))
    more = f"({literal(style.between)} call){{0,{MAX_CALLS - 1}}}" if several else ""
    lines = [
        f"start: calls{' | answer' if answer else ''}",
        f"calls: {literal(style.first)} call {more} {literal(style.last)}",
        f"call: {literal(style.before)} any_call {literal(style.after)}",
    ]
    schemas = [
        schema_grammar(arguments_schema(tool), f"@tools: tool {tool['function']['name']}")
        for tool in tools
    ]
    lines += _rules(style, tools, schemas, literal)
    if answer:
        lines.append(f"answer: {inline(json.loads(answer.text))}")
    return Grammar("grammar", "\n".join(lines))


def free_calls(backbone: Backbone, tools: Tools) -> LazyGrammar:
    """Returns the grammar of an answer that may call tools, which constrains only the calls.

    After the marker of the model's style, a call must follow. Without a marker, the arguments of a call at the start of
    the answer are constrained. If a tool's schema cannot be followed, its arguments may be any object.
    """
    style = style_of(template_of(backbone))
    ids = marker_ids(backbone)
    literal = partial(_literal, ids)
    marker = style.marker
    schemas = [_schema_or_any(tool) for tool in tools]
    lines = [
        f"start: {literal((style.first or style.before).removeprefix(marker))} any_call "
        + (f"({literal(style.between)} any_call){{0,{MAX_CALLS - 1}}}" if style.first else "")
        + f" {literal(style.last or style.after)}",
        *_rules(style, tools, schemas, literal),
    ]
    pattern = "" if marker in ids else re.escape(marker)
    triggers = [Trigger(Grammar("grammar", "\n".join(lines)), ids.get(marker), pattern)]
    for tool, schema in zip(tools, schemas, strict=True):
        lines = ["start: / ?/ arguments", f"arguments: {inline(json.loads(schema.text))}"]
        head = BARE_HEAD.format(name=re.escape(tool["function"]["name"]))
        triggers.append(Trigger(Grammar("grammar", "\n".join(lines)), None, head, at_start=True))
    return LazyGrammar(tuple(triggers))


def _schema_or_any(tool: Mapping[str, Any]) -> Grammar:
    """Returns the grammar of a tool's arguments; if the tool's schema cannot be followed, the grammar of any object."""
    try:
        return schema_grammar(arguments_schema(tool), f"tool {tool['function']['name']}")
    except UsageError as reason:
        note_once(f"calls of a tool are free: {reason.message}")
        return schema_grammar(ANY_OBJECT)


def note_once(text: str) -> None:
    """Logs a warning, unless it was logged before."""
    if text not in _noted and len(_noted) < MAX_NOTED:
        _noted.add(text)
        log.warning("%s", text)


def _literal(ids: Mapping[str, int], text: str) -> str:
    """Returns a text as part of a Lark rule, in which markers that are tokens are written as their ids."""
    parts = re.split("(" + "|".join(map(re.escape, MARKERS)) + ")", text)
    return " ".join(
        f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part
    )


def _rules(
    style: ToolStyle, tools: Tools, schemas: Sequence[Grammar], literal: Callable[[str], str]
) -> list[str]:
    """Returns the rules of `any_call`, a call of one of the tools."""
    lines = [f"any_call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        name = tool["function"]["name"]
        before, tail = style.call.split("ARGUMENTS")
        # A tool's name may itself contain BARE or NAME, so only one of these words is replaced.
        place, written = ("BARE", name) if "BARE" in before else ("NAME", json.dumps(name))
        head = before.replace(place, written)
        lines.append(f"call_{i}: {literal(head)} arguments_{i} {literal(tail)}")
        lines.append(f"arguments_{i}: {inline(json.loads(schema.text))}")
    return lines


def arguments_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a tool's arguments: an object, which has no properties unless the tool describes them."""
    schema = {**(tool["function"].get("parameters") or {})}
    if "object" in (kinds := schema.get("type", "object")):
        kinds = "object"
    schema["type"] = kinds
    others = (schema.get(key) for key in ("additionalProperties", "unevaluatedProperties"))
    if not any(map(schema.get, DESCRIBING)) and all(value in (None, False) for value in others):
        schema["properties"] = {}
    return schema


def template_of(backbone: Backbone) -> str:
    return str(getattr(backbone.tokenizer, "chat_template", None) or "")


def describe_tools(
    backbone: Backbone, messages: Sequence[Message], tools: Tools
) -> tuple[list[Message], dict[str, Any]]:
    """Returns messages and additional chat-template arguments that tell the model about its tools."""
    if "tools" in template_of(backbone):
        return list(messages), {"tools": list(tools)} if tools else {}
    rendered: list[Message] = []
    for message in messages:
        role = message["role"]
        text = message["content"] or ""
        if role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if (
                rendered
                and rendered[-1]["role"] == "user"
                and rendered[-1]["content"].startswith("<tool_response>")
            ):
                rendered[-1]["content"] += "\n" + text
                continue
            role = "user"
        calls = [
            f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
            for call in message.get("tool_calls", ())
        ]
        content = "\n".join([*filter(None, [text]), *calls])
        rest = {name: value for name, value in message.items() if not name.startswith("tool_call")}
        rendered.append({**rest, "role": role, "content": content})
    if tools:
        text = INSTRUCTION.format(tools="\n".join(json.dumps(tool) for tool in tools))
        if rendered[0]["role"] == "system":
            rendered[0]["content"] += "\n\n" + text
        else:
            rendered.insert(0, {"role": "system", "content": text})
    return rendered, {}
