"""Tools: their description in the prompt, the grammar of their calls, and the calls found in a streamed answer.

Models write calls in the style of Hermes and Qwen, of Llama 3, or of Mistral; the chat template
shows which. If the template does not support tools, the system prompt describes them in Hermes'
style.
"""

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_cli.decode.answer import partial_stop
from medusa_cli.decode.grammar import Grammar, inline
from medusa_cli.model import Backbone

# These are tokens in some vocabularies, and plain text in others.
BEGIN = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
END = "</tool_call>"
MARKERS = (*BEGIN, END, "[ARGS]", "[CALL_ID]")
MAX_CALLS = 8  # in an answer that must call a tool
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
        schema = {"type": "object", **(tool["function"].get("parameters") or {"properties": {}})}
        checked = Grammar.of(json_schema=schema)
        assert checked is not None
        lines.append(f"call_{i}: {literal(head)} arguments_{i} {literal(tail)}")
        lines.append(f"arguments_{i}: {inline(json.loads(checked.text))}")
    if answer:
        lines.append(f"answer: {inline(json.loads(answer.text))}")
    return Grammar("grammar", "\n".join(lines))


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


_BEGIN = re.compile("|".join(map(re.escape, BEGIN)))
_JSON_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_ARGS_HEAD = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)")
_NAME_HEAD = '{"name":"'
_BETWEEN = re.compile(r"[\s,;}\]]*(?:\[\s*(?=\{))?")
_decode = json.JSONDecoder().raw_decode


def read_calls(
    text: str, names: Collection[str], last: bool, sent: int = 0
) -> tuple[str, list[tuple[str, str]]]:
    """Returns an answer's content so far, and its calls (name, arguments), as far as both are certain.

    A call begins with a marker of any style, or at the start of the answer. Text that does not call
    a tool in `names` is content. last: the answer ends here; otherwise the arguments of the last
    call may continue. A call that is cut off by the end of the answer is content, too, unless it is
    one of the first `sent` calls, which the client already has.
    """
    reader = _TextReader(text, names, last, sent)
    while reader.skip_to_calls() and reader.read_adjacent_calls():
        pass
    return reader.content, reader.calls


class _TextReader:
    """Holds the position in an answer's text, and the content and calls before it."""

    def __init__(self, text: str, names: Collection[str], last: bool, sent: int) -> None:
        self.content = ""
        self.calls: list[tuple[str, str]] = []
        self._text = text
        self._names = names
        self._last = last
        self._sent = sent
        self._at = 0
        self._start = 0  # text from here on is content unless it becomes a call
        self._begun = False  # content has begun, so a call needs a marker
        self._bare = False  # the text at this position has no marker before it

    def skip_to_calls(self) -> bool:
        """Adds the text before the next marker to the content, and moves after the marker.

        Returns False if there is no other marker so far.
        """
        at = self._at
        is_first = not (self._begun or self.calls)
        self._bare = is_first and self._text[at:].lstrip().startswith("{")
        start, after = (at, at) if self._bare else _next_marker(self._text, at, self._last)
        before = self._text[at:start]
        # White space around calls is not content.
        if before.strip() or (self._begun and not self.calls):
            self.content += before
        if after is None:
            return False
        self._begun = self._begun or bool(self.content)
        self._start = start
        self._at = after
        return True

    def read_adjacent_calls(self) -> bool:
        """Reads calls until no other follows; returns False if the text so far ends among them."""
        while True:
            self._skip_separators()
            if self._is_at_end():
                self._at += len(END)
                return True
            if marker := _BEGIN.match(self._text, self._at):
                self._start, self._at = marker.span()
                self._bare = False
                continue
            parsed = _call_at(self._text, self._at, self._names, self._bare)
            if parsed is None:
                return self._read_as_content()
            call, end = parsed
            self.calls.append(call)
            if end is None:
                self._drop_cut_call()
                return False
            self._start = end
            self._at = end
            self._bare = False

    def _skip_separators(self) -> None:
        if between := _BETWEEN.match(self._text, self._at):
            self._at = between.end()

    def _is_at_end(self) -> bool:
        """Returns True at the marker that ends calls, or at the end of the answer after a marker."""
        if self._text.startswith(END, self._at):
            return True
        return self._last and self._at == len(self._text) and not self._bare

    def _read_as_content(self) -> bool:
        """Adds text that is not a call to the content; returns False if it may still become one."""
        if self._at == len(self._text):
            return False
        if _may_become_call(self._text, self._at, self._bare, self._last):
            return False
        self.content += self._text[self._start : self._at]
        self._begun = True
        return True

    def _drop_cut_call(self) -> None:
        """Makes a call that the end of the answer cuts off content, unless the client already has it."""
        if self._last and len(self.calls) > self._sent:
            self.calls.pop()
            self.content += self._text[self._start :]


def _next_marker(text: str, at: int, last: bool) -> tuple[int, int | None]:
    """Returns the start and end of the next marker from position `at` on.

    Without a marker, the end is None. The start is then where an incomplete marker may begin, or else the text's end.
    """
    if found := _BEGIN.search(text, at):
        return found.span()
    under_way = 0 if last else max(partial_stop(text[at:], marker) for marker in BEGIN)
    return len(text) - under_way, None


def _call_at(
    text: str, at: int, names: Collection[str], bare: bool
) -> tuple[tuple[str, str], int | None] | None:
    """Returns the call that begins at a position, and its end (None while incomplete); None for other text."""
    head = _JSON_HEAD.match(text, at) or _ARGS_HEAD.match(text, at)
    if head and head[1] in names:
        end = _end(text, head.end())
        return (head[1], text[head.end() : end]), end
    if not head and not bare and (call := _whole_call(text, at, names)):
        return call, _end(text, at)
    return None


def _may_become_call(text: str, at: int, bare: bool, last: bool) -> bool:
    """Returns True if the text from a position on is not a call yet, but may become one."""
    if last or END in text[at:] or _JSON_HEAD.match(text, at) or _ARGS_HEAD.match(text, at):
        return False
    squeezed = "".join(text[at : at + 40].split())[: len(_NAME_HEAD)]
    return not bare or _NAME_HEAD.startswith(squeezed)


def _end(text: str, start: int) -> int | None:
    """Returns the end of the JSON value at a position in a text; None while the value is incomplete."""
    try:
        return _decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _whole_call(text: str, start: int, names: Collection[str]) -> tuple[str, str] | None:
    """Returns the name and arguments of a complete call, with its keys in any order or its arguments as a text."""
    end = _end(text, start)
    call = _decode(text, start)[0] if end else None
    if (
        not isinstance(call, dict)
        or not isinstance(call.get("name"), str)
        or call["name"] not in names
    ):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)


class CallReader:
    """Splits a streamed answer into its content and its tool calls."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""
        # Characters sent of the content, and of the last call's arguments.
        self._sent = 0
        self._arguments = 0
        self.count = 0

    def feed(self, text: str, last: bool = False) -> dict[str, Any]:
        """Adds text to the answer; returns the new content and calls as a delta in OpenAI's format."""
        self._text += text
        content, calls = read_calls(self._text, self._names, last, self.count)
        delta: dict[str, Any] = (
            {"content": content[self._sent :]} if len(content) > self._sent else {}
        )
        self._sent = max(self._sent, len(content))
        parts = []
        for index in range(max(0, self.count - 1), len(calls)):
            name, arguments = calls[index]
            if index == self.count:
                id = secrets.token_hex(5)[:9]  # as long as Mistral's ids
                function = {"name": name, "arguments": arguments}
                parts.append({"index": index, "id": id, "type": "function", "function": function})
                self.count += 1
            elif len(arguments) > self._arguments:
                parts.append(
                    {"index": index, "function": {"arguments": arguments[self._arguments :]}}
                )
            self._arguments = len(arguments)
        return {**delta, "tool_calls": parts} if parts else delta
