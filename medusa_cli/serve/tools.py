"""Tools: how a model is told of them, the grammar of their calls, and the calls that its answer makes as it comes.

Models write calls as Hermes and Qwen, as Llama 3, or as Mistral do; the chat template tells which. A model whose
template knows no tools is told of them in the system prompt, in Hermes' form.
"""

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_cli.decode.answer import partial_stop
from medusa_cli.decode.grammar import Grammar, closed, inline
from medusa_cli.model import Backbone

# Tokens of some vocabularies, plain text in others.
BEGIN, END = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"), "</tool_call>"
MARKERS = (*BEGIN, END, "[ARGS]", "[CALL_ID]")
MAX_CALLS = 8  # of an answer that must call
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
    """Describes how a model writes calls: the text around all of them, around and between them, and a call itself."""

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
    """Returns how a model of this chat template writes calls."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL_11 if "[ARGS]" in template else MISTRAL
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return LLAMA
    return HERMES


def marker_ids(backbone: Backbone) -> dict[str, int]:
    """Returns the markers that are special tokens of the model, which decoding would leave out, by their text."""
    tokens = backbone.tokenizer.added_tokens_decoder
    return {token.content: id for id, token in tokens.items() if token.special and token.content in MARKERS}


def calls_grammar(backbone: Backbone, tools: Tools, several: bool, answer: Grammar | None = None) -> Grammar:
    """Returns the grammar of calls of the tools, at least one, in the model's style.

    several: more than one may follow. answer: a JSON schema that the answer may follow instead.
    """
    style, ids = style_of(template_of(backbone)), marker_ids(backbone)

    def literal(text: str) -> str:
        parts = re.split("(" + "|".join(map(re.escape, MARKERS)) + ")", text)
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part)

    more = f"({literal(style.between)} call){{0,{MAX_CALLS - 1}}}" if several else ""
    lines = [
        f"start: calls{' | answer' if answer else ''}",
        f"calls: {literal(style.first)} call {more} {literal(style.last)}",
        f"call: {literal(style.before)} ({' | '.join(f'call_{i}' for i in range(len(tools)))}) {literal(style.after)}",
    ]
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        head, tail = style.call.replace("NAME", json.dumps(name)).replace("BARE", name).split("ARGUMENTS")
        schema = tool["function"].get("parameters") or {"type": "object", "properties": {}}
        lines.append(f"call_{i}: {literal(head)} arguments_{i} {literal(tail)}")
        lines.append(f"arguments_{i}: {inline({'type': 'object', **closed(schema)})}")
    if answer:
        lines.append(f"answer: {inline(json.loads(answer.text))}")
    return Grammar("grammar", "\n".join(lines))


def template_of(backbone: Backbone) -> str:
    return str(getattr(backbone.tokenizer, "chat_template", None) or "")


def describe_tools(
    backbone: Backbone, messages: Sequence[Message], tools: Tools
) -> tuple[list[Message], dict[str, Any]]:
    """Returns messages, and more arguments of the chat template, that tell the model of its tools."""
    if "tools" in template_of(backbone):
        return list(messages), {"tools": list(tools)} if tools else {}
    rendered: list[Message] = []
    for message in messages:
        role, text = message["role"], message["content"] or ""
        if role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if rendered and rendered[-1]["role"] == "user" and rendered[-1]["content"].startswith("<tool_response>"):
                rendered[-1]["content"] += "\n" + text
                continue
            role = "user"
        calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
        rendered.append({"role": role, "content": "\n".join([*filter(None, [text]), *map(_tagged, calls)])})
    if tools:
        text = INSTRUCTION.format(tools="\n".join(json.dumps(tool) for tool in tools))
        if rendered[0]["role"] == "system":
            rendered[0]["content"] += "\n\n" + text
        else:
            rendered.insert(0, {"role": "system", "content": text})
    return rendered, {}


def _tagged(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


_BEGIN = re.compile("|".join(map(re.escape, BEGIN)))
_JSON_HEAD = re.compile(r'\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_ARGS_HEAD = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)")
_NAME_HEAD = '{"name":"'
_BETWEEN = re.compile(r"[\s,;}\]]*(?:\[\s*(?=\{))?")
_decode = json.JSONDecoder().raw_decode


class CallReader:
    """Splits an answer, as it comes, into its content and its calls of tools.

    A call begins with a marker of any style, or with the answer. What is no call of a tool of these names is content.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._rest = ""  # text that has not been decided on
        self._held = ""  # text of the call under way, as long as it may prove to be content
        self._arguments: str | None = None  # of the call under way, as far as they were handed on
        self._state, self._bare = self._content, False
        self._begun = False  # content or a call came
        self.count = 0

    def feed(self, text: str, last: bool = False) -> dict[str, Any]:
        """Takes more of the answer; returns the content and the calls that it adds, as a delta of OpenAI's API."""
        self._rest += text
        self._delta: dict[str, Any] = {}
        while self._state(last):
            pass
        return self._delta

    def _content(self, last: bool) -> bool:
        """Reads content up to the next marker; returns True if more can be read, as all states do."""
        start = self._rest.lstrip()
        if not self._begun and start.startswith("{"):
            return self._begin_call(self._rest, "", bare=True)
        if match := _BEGIN.search(self._rest):
            if self._rest[: match.start()].strip():
                self._say(self._rest[: match.start()])
            return self._begin_call(match[0], self._rest[match.end() :])
        kept = 0 if last else max(partial_stop(self._rest, marker) for marker in BEGIN)
        text = self._rest[: len(self._rest) - kept]
        if not text.strip() and (self.count or not self._begun):  # blanks beside a call are none of the content
            return False
        self._rest = self._rest[len(text) :]
        self._say(text)
        return False

    def _begin_call(self, held: str, rest: str, bare: bool = False) -> bool:
        self._held, self._bare, self._state = ("" if bare else held), bare, self._call
        self._rest = held if bare else rest
        return True

    def _call(self, last: bool) -> bool:
        """Reads the head of a call, or what ends a group of calls."""
        between = _BETWEEN.match(self._rest)
        text = self._rest = self._rest[between.end() if between else 0 :]
        self._held += between[0] if between else ""
        if text.startswith(END) or (last and not text and not self._bare):
            self._rest, self._held, self._state = text.removeprefix(END), "", self._content
            return bool(self._rest)
        if match := _BEGIN.match(text):
            return self._begin_call(match[0], text[match.end() :])
        if match := _JSON_HEAD.match(text) or _ARGS_HEAD.match(text):
            if match[1] not in self._names:
                return self._give_up()
            self._open(match[1])
            self._rest, self._arguments, self._state = text[match.end() :], "", self._read_arguments
            return True
        if (call := self._whole(text)) is not None:
            return self._take_whole(*call)
        squeezed = "".join(text[:40].split())[: len(_NAME_HEAD)]
        hopeless = self._bare and squeezed != _NAME_HEAD[: len(squeezed)]
        if text and (last or END in text or hopeless):
            return self._give_up()
        return False

    def _whole(self, text: str) -> tuple[str, str, int] | None:
        """Returns name, arguments and end of a call in another order, or with its arguments in a text."""
        if not text.startswith("{") or self._bare:
            return None
        try:
            call, end = _decode(text)
        except (ValueError, RecursionError):
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(call.get("name"), str) or call["name"] not in self._names:
            return None
        return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments), end

    def _take_whole(self, name: str, arguments: str, end: int) -> bool:
        self._open(name)
        self._delta["tool_calls"][-1]["function"]["arguments"] = arguments
        self._rest, self._held, self._begun = self._rest[end:], "", True
        return True

    def _read_arguments(self, last: bool) -> bool:
        """Hands arguments on up to their end."""
        assert self._arguments is not None
        text, known = self._arguments + self._rest, len(self._arguments)
        end = None
        if "}" in self._rest:
            try:
                end = _decode(text)[1]
            except (ValueError, RecursionError):
                end = None
        if new := text[known:end]:
            calls = self._delta.setdefault("tool_calls", [])
            if not calls or calls[-1]["index"] != self.count - 1:
                calls.append({"index": self.count - 1, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += new
        self._arguments, self._rest = text[:end], "" if end is None else text[end:]
        if end is None:
            return False
        self._arguments, self._state = None, self._call
        return True

    def _open(self, name: str) -> None:
        """Begins a call."""
        call = {"index": self.count, "id": secrets.token_hex(5)[:9], "type": "function"}  # as long as Mistral's
        self._delta.setdefault("tool_calls", []).append({**call, "function": {"name": name, "arguments": ""}})
        self.count, self._held, self._begun, self._bare = self.count + 1, "", True, False

    def _give_up(self) -> bool:
        """Takes what was held for content; what follows may yet hold a call."""
        self._say(self._held)
        self._held, self._begun, self._state = "", True, self._content
        return True

    def _say(self, text: str) -> None:
        if text:
            self._begun = True
            self._delta["content"] = self._delta.get("content", "") + text
