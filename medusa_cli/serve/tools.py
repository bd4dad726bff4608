"""Tools: their description in the prompt, and the grammar of their calls.

Models write calls in the style of Hermes and Qwen, of Llama 3, or of Mistral; the chat template
shows which. If the template does not support tools, the system prompt describes them in Hermes'
style.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_cli.decode.grammar import Grammar, inline
from medusa_cli.model import Backbone
from medusa_cli.serve.calls import MARKERS

MAX_CALLS = 8  # in an answer that must call a tool
# Keywords of JSON Schema that say nothing about the properties of an object if they are empty.
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

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolStyle:
    """Describes how a model writes calls: the text around all calls, around and between calls, and a call itself."""

    first: str = ""
    last: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    call: str = '{"name": NAME, "arguments": ARGUMENTS}'


HERMES = ToolStyle(before="<tool_call>\n", after="\n</tool_call>", between="\n")
LLAMA = ToolStyle(between="; ", call='{"name": NAME, "parameters": ARGUMENTS}')
MISTRAL = ToolStyle(first="[TOOL_CALLS] [", last="]", between=", ")
MISTRAL_11 = ToolStyle(before="[TOOL_CALLS]", call="BARE[ARGS]ARGUMENTS")


def style_of(template: str) -> ToolStyle:
    """Returns the style in which a model with this chat template writes calls."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL_11 if "[ARGS]" in template else MISTRAL
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return LLAMA
    return HERMES


def marker_ids(backbone: Backbone) -> dict[str, int]:
    """Returns the ids, by text, of the markers that are tokens of the model, special or not."""
    tokens = backbone.tokenizer.added_tokens_decoder
    return {token.content: id for id, token in tokens.items() if token.content in MARKERS}


def calls_grammar(
    backbone: Backbone, tools: Tools, several: bool, answer: Grammar | None = None
) -> Grammar:
    """Returns the grammar of one or more tool calls in the model's style.

    several: allow more than one call. answer: a JSON schema that the answer may follow instead.
    """
    style = style_of(template_of(backbone))
    ids = marker_ids(backbone)

    def literal(text: str) -> str:
        parts = re.split("(" + "|".join(map(re.escape, MARKERS)) + ")", text)
        return " ".join(
            f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part
        )

    more = f"({literal(style.between)} call){{0,{MAX_CALLS - 1}}}" if several else ""
    lines = [
        f"start: calls{' | answer' if answer else ''}",
        f"calls: {literal(style.first)} call {more} {literal(style.last)}",
        f"call: {literal(style.before)} ({' | '.join(f'call_{i}' for i in range(len(tools)))}) {literal(style.after)}",
    ]
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        before, tail = style.call.split("ARGUMENTS")
        # A tool's name may itself contain these words.
        place, written = ("BARE", name) if "BARE" in before else ("NAME", json.dumps(name))
        head = before.replace(place, written)
        checked = Grammar.of(json_schema=arguments_schema(tool))
        assert checked is not None
        lines.append(f"call_{i}: {literal(head)} arguments_{i} {literal(tail)}")
        lines.append(f"arguments_{i}: {inline(json.loads(checked.text))}")
    if answer:
        lines.append(f"answer: {inline(json.loads(answer.text))}")
    return Grammar("grammar", "\n".join(lines))


def arguments_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a tool's arguments, an object that is empty unless the tool describes it."""
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
        calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
        content = "\n".join([*filter(None, [text]), *map(_tagged, calls)])
        rest = {name: value for name, value in message.items() if not name.startswith("tool_call")}
        rendered.append({**rest, "role": role, "content": content})
    if tools:
        text = INSTRUCTION.format(tools="\n".join(json.dumps(tool) for tool in tools))
        if rendered[0]["role"] == "system":
            rendered[0]["content"] += "\n\n" + text
        else:
            rendered.insert(0, {"role": "system", "content": text})
    return rendered, {}


def _tagged(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"
