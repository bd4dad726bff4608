"""Finds the tool calls in an answer's text; the text outside the calls is the answer's content."""

import json
import re
import secrets
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

# Markers, which are tokens in some vocabularies and plain text in others.
BEGIN = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
END = "</tool_call>"
MARKERS = (*BEGIN, END, "[ARGS]", "[CALL_ID]")
FENCE = "```"
_BEGIN = re.compile("|".join(map(re.escape, BEGIN)))
_ARGS_HEAD = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)")
_ARGS_BEGUN = re.compile(r"([\w.-]*)(\[[^{\s]*\s*)?$")
_BLANK = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s,;}\]]*")
_FENCE = re.compile(r"```[\w-]*\s*")
_LIST = re.compile(r"\[\s*")
_LIST_END = re.compile(r"\s*\]")
# How small models begin a call whose first key is not the name.
_OTHER_HEADS = ('{"type":"function"', '{"arguments":{', '{"parameters":{')
_decode = json.JSONDecoder().raw_decode


class Call(NamedTuple):
    """Holds a call in a text. end: the position after the call, None while the call may continue."""

    name: str
    arguments: str
    end: int | None


def read_calls(
    text: str, names: Collection[str], last: bool, sent: int = 0
) -> tuple[str, list[tuple[str, str]]]:
    """Returns an answer's content and calls (name, arguments), up to the first text that may still become either.

    A call follows a marker of any style, or begins the answer, perhaps in a code fence. Text that does not call a tool
    in `names` is content. last: the text is the whole answer; otherwise the arguments of the last call may continue.
    sent: the number of calls that the client already has. A later call that the end of the answer cuts off is content.
    """
    reader = _TextReader(text, names, last, sent)
    reader.read()
    return reader.content, [(call.name, call.arguments) for call in reader.calls]


def end_of_first_call(text: str, names: Collection[str]) -> int | None:
    """Returns the position after the first call in a text, or None if there is no call or the call is incomplete."""
    reader = _TextReader(text, names, last=False, sent=0)
    reader.read()
    return reader.calls[0].end if reader.calls else None


class _TextReader:
    """Holds the position in an answer's text, and the content and calls before this position."""

    def __init__(self, text: str, names: Collection[str], last: bool, sent: int) -> None:
        self.content = ""
        self.calls: list[Call] = []
        self._text = text
        self._names = names
        self._last = last
        self._sent = sent
        self._at = 0
        # Text from here on is content unless it becomes a call.
        self._start = 0
        # True after a marker or a call. There, calls may have forms that are content elsewhere.
        self._marked = False
        self._fenced = False
        self._listed = False

    def read(self) -> None:
        """Reads the text up to the first part that may turn out to be either content or a call."""
        while self._read_calls() and self._skip_to_marker():
            pass

    def _skip_to_marker(self) -> bool:
        """Adds the text before the next marker to the content, and moves to the marker.

        Returns False if the text has no further marker.
        """
        begin = _BEGIN.search(self._text, self._at)
        if begin:
            end = begin.start()
        elif self._last:
            end = len(self._text)
        else:
            rest = self._text[self._at :]
            end = len(self._text) - max(_begun(rest, marker) for marker in BEGIN)
        before = self._text[self._at : end]
        # White space around calls is not content.
        if before.strip() or (self.content and not self.calls):
            self.content += before
        self._at = end
        return begin is not None

    def _read_calls(self) -> bool:
        """Reads calls until other text follows; returns False if the text ends first, perhaps within a call."""
        while True:
            if self._listed and (closed := _LIST_END.match(self._text, self._at)):
                self._start = self._at = closed.end()
                self._listed = False
            blank = _BETWEEN if self._marked else _BLANK
            at = blank.match(self._text, self._at).end()  # type: ignore[union-attr]
            if at == len(self._text):
                return False
            if marker := _BEGIN.match(self._text, at):
                self._start, self._at = marker.span()
                self._marked = True
                continue
            if self._marked and self._text.startswith(END, at):
                self._start = self._at = at + len(END)
                return True
            if self._fenced and self._text.startswith(FENCE, at):
                self._start = self._at = at + len(FENCE)
                self._fenced = False
                continue
            call = self._call_at(at)
            if isinstance(call, bool):
                if call and not self._last:
                    return False
                self.content += self._text[self._start : at]
                self._start = self._at = at
                return True
            self.calls.append(call)
            if call.end is None:
                if self._last and len(self.calls) > self._sent:
                    self._drop_cut_call(at)
                return False
            self._start = self._at = call.end
            self._marked = True

    def _drop_cut_call(self, at: int) -> None:
        """Turns a call that the end of the answer cut off into content."""
        self.calls.pop()
        marked = _BEGIN.match(self._text, self._start)
        self.content += self._text[self._start if marked or not self.calls else at :]

    def _call_at(self, at: int) -> Call | bool:
        """Returns the call at a position, perhaps within a code fence or a list.

        If the text there is not a call, returns whether it may become one.
        """
        text = self._text
        rest = text[at : at + len(END) + len(FENCE)]
        if any(word.startswith(rest) for word in (*BEGIN, END, FENCE)):
            return True
        fence = _FENCE.match(text, at)
        start = fence.end() if fence else at
        if opened := _LIST.match(text, start):
            start = opened.end()
        if start == len(text):
            return True
        if start > at and text[start] != "{":
            return False
        call = call_at(text, start, self._names, self._marked, self._last)
        if isinstance(call, Call):
            self._fenced = self._fenced or fence is not None
            self._listed = self._listed or opened is not None
        return call


def call_at(text: str, at: int, names: Collection[str], marked: bool, last: bool) -> Call | bool:
    """Returns the call that begins at a position; if there is none, returns whether the text may become a call.

    marked: a marker or a call precedes the position. Otherwise, a call must begin in a usual way and have arguments, so
    that other JSON is not mistaken for a call.
    """
    if not text.startswith("{", at):
        return marked and _call_by_args(text, at, names)
    head = read_head(text, at, names)
    if isinstance(head, tuple):
        name, start = head
        if text[start] == "{":
            end = _end(text, start)
            if end is None:
                return Call(name, text[start:], None)
            return Call(name, text[start:end], _close(text, at, end, last))
    elif head:
        return True
    squeezed = "".join(text[at : at + 40].split())
    other = any(squeezed.startswith(begun) or begun.startswith(squeezed) for begun in _OTHER_HEADS)
    if not (marked or other or isinstance(head, tuple)):
        return False
    end = _end(text, at)
    if end is None:
        return END not in text[at:]
    call = _whole_call(_decode(text, at)[0], names, marked)
    return Call(*call, end) if call else False


def read_head(text: str, at: int, names: Collection[str]) -> tuple[str, int] | bool:
    """Returns the name of the call whose JSON begins at a position, and the position of its arguments.

    For other text, returns whether it may become the beginning of a call.
    """
    name = ""
    quoted = [f'"{name}"' for name in names]
    for words in (["{"], ['"name"'], [":"], quoted, [","], ['"arguments"', '"parameters"'], [":"]):
        at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
        word = next((word for word in words if text.startswith(word, at)), None)
        if word is None:
            rest = text[at:]
            return any(word.startswith(rest) for word in words)
        name = word.strip('"') if words is quoted else name
        at += len(word)
    at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
    return (name, at) if at < len(text) else True


def _call_by_args(text: str, at: int, names: Collection[str]) -> Call | bool:
    """Returns the same as `call_at`, for a call whose name stands before `[ARGS]`."""
    head = _ARGS_HEAD.match(text, at)
    if head and head[1] in names:
        end = _end(text, head.end())
        return Call(head[1], text[head.end() : end], end)
    begun = _ARGS_BEGUN.match(text, at)
    if head or not begun:
        return False
    return begun[1] in names if begun[2] else any(name.startswith(begun[1]) for name in names)


def _close(text: str, start: int, end: int, last: bool) -> int | None:
    """Returns the end of a call's object, which begins at `start`; end: the end of the call's arguments.

    Returns None while the object may continue. Small models sometimes omit the object's last bracket.
    """
    whole = _end(text, start)
    rest = text[end:].lstrip()
    if whole is not None or last or rest[:1] not in ("", ","):
        return end if whole is None else whole
    return None


def _end(text: str, start: int) -> int | None:
    """Returns the end of the JSON value at a position in a text; None while the value is incomplete."""
    try:
        return _decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _whole_call(call: Any, names: Collection[str], marked: bool) -> tuple[str, str] | None:
    """Returns the name and arguments (JSON or a text) of a call with keys in any order; None for other JSON."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or call.get("name") not in [*names]:
        return None
    if not marked and not {"arguments", "parameters"} & call.keys():
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        return call["name"], arguments
    return call["name"], json.dumps({} if arguments is None else arguments)


def in_order(delta: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the parts of a delta in the order of the answer.

    The parts are ("content", text), ("call", the beginning of a call) and ("arguments", text of the last call).
    """
    calls = list(delta.get("tool_calls", ()))
    while calls and "id" not in calls[0]:  # the rest of the open call
        yield "arguments", calls.pop(0)["function"]["arguments"]
    if content := delta.get("content"):
        yield "content", content
    for call in calls:
        if "id" in call:
            yield "call", call
        if arguments := call["function"]["arguments"]:
            yield "arguments", arguments


class CallReader:
    """Splits a streamed answer into its content and its tool calls."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""
        # Numbers of characters sent: of the content, and of the last call's arguments.
        self._sent = 0
        self._arguments = 0
        self.count = 0

    def feed(self, text: str, last: bool = False) -> dict[str, Any]:
        """Adds text to the answer; returns the new content and calls as a delta in OpenAI's format."""
        self._text += text
        content, calls = read_calls(self._text, self._names, last, self.count)
        delta: dict[str, Any] = {}
        if len(content) > self._sent:
            delta = {"content": content[self._sent :]}
            self._sent = len(content)
        parts = []
        for index in range(max(0, self.count - 1), len(calls)):
            name, arguments = calls[index]
            if index == self.count:
                # Mistral's ids have nine characters, too.
                id = secrets.token_hex(5)[:9]
                function = {"name": name, "arguments": arguments}
                parts.append({"index": index, "id": id, "type": "function", "function": function})
                self.count += 1
            elif len(arguments) > self._arguments:
                more = {"arguments": arguments[self._arguments :]}
                parts.append({"index": index, "function": more})
            self._arguments = len(arguments)
        return {**delta, "tool_calls": parts} if parts else delta


def _begun(text: str, marker: str) -> int:
    """Returns the number of characters at the end of a text that may begin a marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
