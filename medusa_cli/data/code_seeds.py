"""Seed prompts about code, made from the Python sources installed here or picked from other seeds."""

import ast
import hashlib
import io
import random
import re
import sysconfig
import textwrap
import tokenize
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_cli.data.conversation import Conversation

KINDS = ("complete", "explain", "repair", "test", "translate", "change", "fim")
WEIGHTS = (2, 1, 2, 1, 1, 2, 1)
SEEDS = 20_000  # maximum number of seeds; reading the sources for them takes half a minute
FROM_A_FILE = 4
FILE_BYTES = 200_000
SIZES = range(200, 2001)  # characters in a function
CLASS_SIZES = range(600, 3501)
_UNREADABLE = (OSError, ValueError, SyntaxError, RecursionError, MemoryError)
SKIPPED = {
    *("test", "tests", "testing", "_vendor", "vendor"),
    *("site-packages", "dist-packages", "__pycache__"),
}
LANGUAGES = (
    *("JavaScript", "TypeScript", "Java", "C++", "C#", "Go"),
    *("Rust", "Ruby", "Kotlin", "Swift"),
)
# Tokens that precede the text before a gap, the text after the gap, and the text that fills the
# gap, as used by Qwen, StarCoder and DeepSeek. Seeds contain the first set of tokens.
FIM = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
# Substitutions of tokens that introduce a bug into the code of a repair prompt.
SWAPS = {"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "+": "-", "-": "+"}
SWAPS |= {"and": "or", "or": "and", "True": "False", "False": "True", "0": "1", "1": "0"}

ASKS = {
    "complete": (
        "Complete this Python function. Answer with the whole function.",
        "Finish the function below.",
        "The body of this function is missing or cut off. Write it, following the docstring.",
    ),
    "explain": (
        "Explain what this code does, step by step.",
        "What does this do, and what are its edge cases?",
        "I am new to this code base. Explain this part to me briefly.",
    ),
    "repair": (
        "This function gives wrong results. Find the bug and fix it.",
        "There is a mistake in this code. What is it? Show the corrected code.",
    ),
    "trace": ("I get this error. What is wrong? Show the fixed function.", "Fix this:"),
    "test": (
        "Write pytest tests for this code, edge cases included.",
        "Write unit tests for this. Mock what it needs from outside.",
    ),
    "translate": (
        "Translate this Python code to {language}.",
        "Rewrite this in idiomatic {language}.",
    ),
    "change": (
        "Add type hints to every signature. Return the whole code, otherwise unchanged.",
        "Add logging (the `logging` module) where it helps to find faults. Return the whole code.",
        "Check the arguments and raise ValueError with a clear message where they are wrong. Return the whole code.",
        "Rewrite the docstrings in Google's style. Return the whole code, otherwise unchanged.",
        "Rename `{name}` to `{name}_value` everywhere. Return the whole code, otherwise unchanged.",
        "Simplify this code without changing what it does. Return all of it.",
    ),
}
FOLLOWING = {
    "complete": ("Now add type hints and handle bad input.", "Write three tests for it."),
    "explain": ("Show an example of how it is called.", "How would you simplify it?"),
    "repair": ("Write a test that would have caught this.", "Are there other problems in it?"),
    "test": (
        "Use pytest.mark.parametrize where it makes them shorter.",
        "Which cases are still untested?",
    ),
    "translate": ("Show how to call it, with the expected output.", "Now add comments."),
    "change": ("Summarise the change as a commit message.", "Now show it as a unified diff."),
}
# Signs of code in a text: a code fence, a line in a programming language, a traceback, or a word
# that only programmers use.
_CODE = re.compile(
    r"```|Traceback \(most recent call last\)|#include *[<\"]|</(?:div|html|script|body|span)>|\w\([^()\n]*\);\s*$"
    r"|^\s*(?:def \w+\(|class \w+[:({]|import \w+$|from [\w.]+ import |(?:public|private) (?:static|class|void) "
    r"|(?:const|let|var) \w+ ?=|function \w*\(|SELECT .+ FROM |<\?php)"
    r"|\b(?:print|console\.log|plt\.\w+)\(|\w\.(?:py|js|cpp)\b"
    r"|(?<![\w./])(?:python|javascript|typescript|golang|php|html|css|json|sql|mysql|postgres\w*|mongodb|django|flask"
    r"|pandas|numpy|pytorch|tensorflow|node\.?js|react\.?js|angularjs|laravel|docker\w*|kubernetes|kubectl|bash"
    r"|powershell|regex|vba|opengl|unit tests?|source code|code (?:snippet|review|block)|stack trace|refactor\w*"
    r"|debug\w*|compiler|programming|(?:write|fix|explain|following|above|entire|this|the|my|some|your) code)\b"
    r"|\bC(?:\+\+|#)(?!\w)",
    re.IGNORECASE | re.MULTILINE,
)
# Web search results that were pasted into ShareGPT prompts contain URLs and program names, whatever
# their subject.
_PASTED = "Web search results:"


def is_code(text: str) -> bool:
    """Returns True for a turn about programming."""
    return not text.startswith(_PASTED) and _CODE.search(text) is not None


def code_seeds(random_seed: int, limit: int | None = None) -> list[Conversation]:
    """Returns prompts made from the standard library and installed packages.

    The prompts are the same for the same random seed. Each source is used once, even if several
    packages contain a copy. A smaller limit returns only the first of these prompts.
    """
    seeds: dict[str, Conversation] = {}
    for source in _sources(random_seed):
        if len(seeds) == min(limit or SEEDS, SEEDS):
            break
        digest = hashlib.sha256(" ".join(source.text.split()).encode()).hexdigest()[:12]
        if digest not in seeds:
            seeds[digest] = _seed(source, digest, random.Random(f"{random_seed}:{digest}"))
    return list(seeds.values())


@dataclass(frozen=True)
class _Source:
    """Holds a function or class, its text without indentation, and its file and line."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    text: str
    file: str
    line: int

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def head(self) -> int:
        """Returns the number of lines up to the end of the docstring."""
        return (self.node.body[0].end_lineno or 0) - self.line + 1


def _sources(random_seed: int) -> Iterator[_Source]:
    """Yields documented functions and classes, at most FROM_A_FILE per file, in an order that random_seed decides."""
    files: dict[str, Path] = {}
    for key in ("stdlib", "purelib", "platlib"):
        root = Path(sysconfig.get_paths()[key])
        for path in root.rglob("*.py"):
            relative = path.relative_to(root)
            if not SKIPPED.intersection(relative.parts):
                files[relative.as_posix()] = path

    def mixed(name: str) -> str:
        return hashlib.sha256(f"{random_seed}:{name}".encode()).hexdigest()

    for name in sorted(files, key=mixed):
        yield from _sources_of(files[name], name, random.Random(f"{random_seed}:{name}"))


def _sources_of(path: Path, name: str, chance: random.Random) -> list[_Source]:
    """Returns a sample of a file's documented functions and classes, or none if the file cannot be parsed."""
    try:
        data = path.read_bytes()
        if len(data) > FILE_BYTES:
            return []
        text = data.decode()
        tree = ast.parse(text)
    except _UNREADABLE:
        return []
    lines = text.splitlines()
    sources = []
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = [child for owner in classes for child in owner.body]
    for node in [*tree.body, *methods]:
        if not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) or not ast.get_docstring(node):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        part = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
        sizes = CLASS_SIZES if isinstance(node, ast.ClassDef) else SIZES
        # Sources with <| are left out, because a tokenizer would treat such strings as special
        # tokens.
        if (
            len(part) in sizes
            and len(node.body) > 2
            and "<|" not in part
            and "```" not in part
            and _parses(part)
        ):
            sources.append(_Source(node, part, name, first))
    return chance.sample(sources, min(len(sources), FROM_A_FILE))


def _parses(text: str) -> bool:
    """Returns False if a part is not valid code by itself, for example if a multi-line string prevents dedenting."""
    try:
        ast.parse(text)
    except _UNREADABLE:
        return False
    return True


def _seed(source: _Source, digest: str, chance: random.Random) -> Conversation:
    """Returns a prompt of a random kind about a source, followed in half of the cases by a second prompt."""
    if isinstance(source.node, ast.ClassDef):
        kind = chance.choice(("change", "change", "explain", "test"))
    else:
        kind = chance.choices(KINDS, WEIGHTS)[0]
    file = hashlib.sha256(source.file.encode()).hexdigest()[:8]
    if kind == "fim":
        gap = _with_gap(source, chance)
        return Conversation.from_turns(f"code-fim-{file}-{digest}", [gap], raw=True)

    code = source.text
    error = ""
    if kind == "repair":
        code, error = _broken(source, chance)
        kind = "explain" if code == source.text else kind  # nothing in the code can be broken
    elif kind == "complete":
        shown = source.head + chance.randrange(1 + (len(source.lines) - source.head) // 2)
        code = "\n".join(source.lines[:shown])

    ask = chance.choice(ASKS["trace" if error else kind])
    ask = ask.format(language=chance.choice(LANGUAGES), name=_name_in(source, chance))
    block = f"```python\n{code}\n```"
    if error:
        block += f"\n\n```\n{error}\n```"
    prompt = f"{ask}\n\n{block}" if chance.random() < 0.7 else f"{block}\n\n{ask}"
    turns = [prompt, chance.choice(FOLLOWING[kind])] if chance.random() < 0.5 else [prompt]
    return Conversation.from_turns(f"code-{kind}-{file}-{digest}", turns)


def _name_in(source: _Source, chance: random.Random) -> str:
    """Returns the name of a random argument or variable in a source."""
    names = {node.arg for node in ast.walk(source.node) if isinstance(node, ast.arg)} - {
        "self",
        "cls",
    }
    return chance.choice(sorted(names | _variables(source)) or [source.node.name])


def _variables(source: _Source) -> set[str]:
    """Returns the names of the variables to which a source assigns values."""
    nodes = ast.walk(source.node)
    return {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _broken(source: _Source, chance: random.Random) -> tuple[str, str]:
    """Returns a source with one bug, and the traceback if the bug is a misspelled name, otherwise "".

    A source in which nothing can be broken is returned unchanged.
    """
    tokens = list(tokenize.generate_tokens(io.StringIO(source.text + "\n").readline))
    body = [token for token in tokens if token.start[0] > source.head]
    variables = _variables(source)
    names = [token for token in body if token.string in variables and len(token.string) > 3]
    swaps = [token for token in body if token.string in SWAPS]
    # The first occurrence of a name assigns the variable. A misspelling there would only define
    # another variable.
    first = {token.string: token for token in reversed(names)}
    names = [token for token in names if token is not first[token.string] and not _assigns(token)]

    lines = source.lines
    if names and (not swaps or chance.random() < 0.5):
        token = chance.choice(names)
        at = chance.randrange(1, len(token.string) - 1)
        wrong = token.string[:at] + token.string[at + 1 :]
        _put(lines, token, wrong)
        row = token.start[0] - 1
        error = (
            f'Traceback (most recent call last):\n  File "{source.file}", line {source.line + row}, in '
            f"{source.node.name}\n    {lines[row].strip()}\n"
            f"NameError: name '{wrong}' is not defined. Did you mean: '{token.string}'?"
        )
        return "\n".join(lines), error
    if swaps:
        token = chance.choice(swaps)
        _put(lines, token, SWAPS[token.string])
    return "\n".join(lines), ""


def _assigns(token: tokenize.TokenInfo) -> bool:
    """Returns True if the surrounding text shows that a name is assigned, is a keyword argument or follows a dot."""
    start = token.start[1]
    end = token.end[1]
    return bool(re.match(r"\s*(?:[-+*/|&]?=(?!=)|,|:|\bin\b)", token.line[end:])) or token.line[
        :start
    ].endswith(".")


def _put(lines: list[str], token: tokenize.TokenInfo, text: str) -> None:
    """Replaces a token in a list of lines with a text."""
    line = lines[token.start[0] - 1]
    lines[token.start[0] - 1] = line[: token.start[1]] + text + line[token.end[1] :]


def _with_gap(source: _Source, chance: random.Random) -> str:
    """Returns a source as the prefix and the suffix of a gap of one to five lines, which lies after the docstring."""
    lines = source.lines
    first = chance.randrange(source.head, len(lines))
    last = min(len(lines), first + chance.randint(1, 5))
    prefix = "".join(f"{line}\n" for line in lines[:first])
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    suffix = "\n" + "\n".join(lines[last:])
    before, behind, gap = FIM[0]
    return f"{before}{prefix}{indent}{behind}{suffix}{gap}"


def fim_tokens(tokenizer: Any) -> tuple[str, str, str] | None:
    """Returns a tokenizer's fill-in-the-middle tokens, or None if its vocabulary has none of FIM."""
    vocabulary = tokenizer.get_vocab()
    return next((tokens for tokens in FIM if all(token in vocabulary for token in tokens)), None)


def with_fim_tokens(seeds: Sequence[Conversation], tokenizer: Any) -> list[Conversation]:
    """Returns seeds with the tokenizer's own FIM tokens in raw prompts; without such tokens, drops raw prompts."""
    own = fim_tokens(tokenizer)
    if own is None:
        return [seed for seed in seeds if not seed.raw]
    return [replace(seed, messages=_renamed(seed, own)) if seed.raw else seed for seed in seeds]


def _renamed(seed: Conversation, own: Collection[str]) -> list[dict[str, str]]:
    text = seed.turns[0]
    for neutral, token in zip(FIM[0], own, strict=True):
        text = text.replace(neutral, token)
    return [{"role": "user", "content": text}]
