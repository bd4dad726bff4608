"""Regular expressions of JSON Schema (ECMA-262), rewritten for llguidance."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

SPACES = r"\t\n\x0b\x0c\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
ANY = r"[\s\S]"
NO_CHARACTER = r"[^\s\S]"
# Patterns with look-ahead from popular libraries, and their equivalents without look-ahead.
KNOWN = {
    # zod's z.email()
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@"
        r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    )
}
# Groups and escapes that cannot be followed.
REFUSED = {
    "(?=": "look-ahead",
    "(?!": "look-ahead",
    "(?<=": "look-behind",
    "(?<!": "look-behind",
    r"\b": "a word boundary",
    r"\B": "a word boundary",
    r"\k": "a back-reference",
}
_TOKEN = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\u\{[0-9a-fA-F]+\}"
    r"|\\x[0-9a-fA-F]{2}|\\c[a-zA-Z]|\\[pP]\{[^}]*\}|\\[\s\S]|\(\?<?[=!]|\{\d+(?:,\d*)?\}|[\s\S]"
)


def followed_pattern(pattern: str) -> str:
    """Returns an equivalent regular expression for llguidance; raises ValueError with the reason if there is none."""
    tokens = _TOKEN.findall(KNOWN.get(pattern, pattern))
    tokens.reverse()
    parts: list[str] = []
    while tokens:
        token = tokens.pop()
        if token in REFUSED:
            raise ValueError(f"{REFUSED[token]} cannot be followed")
        if token == "[":
            parts.append(_class(tokens))
        elif len(token) > 1 and token[0] != "\\":
            parts.append(token)
        else:
            parts.append(_character(token))
    return "".join(parts)


def _class(tokens: list[str]) -> str:
    """Removes a character class from the end of the reversed tokens, and returns it in llguidance's syntax."""
    negated = tokens[-1:] == ["^"] and bool(tokens.pop())
    parts: list[str] = []
    while True:
        if not tokens:
            raise ValueError("a class has no end")
        token = tokens.pop()
        if token == "]":
            break
        if token == r"\b":
            parts.append(r"\x08")
        elif token[0] == "\\":
            parts.append(_escape(token))
        else:
            parts.append(re.sub(r"([\[&~])", r"\\\1", token))
    if not parts:
        return ANY if negated else NO_CHARACTER
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _character(token: str) -> str:
    """Returns a character or escape that is not part of a character class, in llguidance's syntax."""
    if token[0] == "\\":
        return _escape(token)
    if token == ".":
        return r"[^\n\r\x{2028}\x{2029}]"
    return "\\" + token if token in "{}]" else token


def _escape(token: str) -> str:
    letter = token[1:2]
    if letter == "u" and len(token) > 2:
        digits = re.findall(r"[0-9a-fA-F]+", token)
        code = int(digits[0], 16)
        if len(digits) == 2:
            code = 0x10000 + ((code - 0xD800) << 10) + int(digits[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000:
            raise ValueError("half a character cannot be written")
        return f"\\x{{{code:x}}}"
    if letter == "c" and len(token) == 3:
        return f"\\x{{{ord(token[2]) % 32:x}}}"
    if letter in "123456789":
        raise ValueError("a back-reference cannot be followed")
    if letter in "sS":
        return f"[{'^' if letter == 'S' else ''}{SPACES}]"
    if letter in "dDwWtnrf" or token[:3] in (r"\p{", r"\P{") or len(token) > 2:
        return token
    # A, z and Z are anchors in Python and Rust.
    special = {"v": r"\x0b", "0": r"\x00", "A": "^", "z": "$", "Z": "$"}
    if letter in special:
        return special[letter]
    return letter if letter.isalnum() else re.escape(letter)


def other_than(texts: Iterable[str]) -> str:
    """Returns a pattern that matches all texts except these."""
    return f"^{_other_than(set(texts))}$"


def _other_than(texts: set[str]) -> str:
    following = defaultdict[str, set[str]](set)
    for text in texts:
        if text:
            following[text[0]].add(text[1:])
    if not following:
        return f"{ANY}+" if texts else f"{ANY}*"
    options = [] if "" in texts else [""]
    letters = "".join(f"\\u{{{ord(letter):x}}}" for letter in following)
    options.append(f"[^{letters}]{ANY}*")
    options += [
        f"\\u{{{ord(letter):x}}}{_other_than(rests)}" for letter, rests in following.items()
    ]
    return f"(?:{'|'.join(options)})"
