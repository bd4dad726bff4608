"""Conversion of conversations into token ids and answer spans; chat templates need no generation marks.

The template is rendered up to the start of each answer, and up to the answer's end. The difference
is the answer with its end token.
"""

import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from medusa_cli.errors import UserError, first_line
from medusa_cli.files import process
from medusa_cli.files.io import HALF, Malformed, is_whole
from medusa_cli.files.model_files import no_chat_template

Message = dict[str, str]


class ChatTokenizer(Protocol):
    """Describes the part of a backbone that tokenizes conversations.

    If an endpoint runs the model, only this part is loaded.
    """

    id: str
    tokenizer: Any
    vocab_size: int

    @property
    def eos_ids(self) -> Collection[int]: ...


# Limits of rendering a chat template: seconds, additional bytes of memory, and the characters by which
# the text may exceed four times the length of the messages.
MAX_SECONDS = 10.0
MAX_BYTES = 1 << 30
MAX_GROWTH = 1 << 20
TICK_S = 0.1
# The file in which Linux reports how many pages the process uses.
STATM = Path("/proc/self/statm")


def render(
    model: ChatTokenizer,
    messages: list[dict[str, Any]],
    *,
    prompt: bool,
    template: Mapping[str, Any] | None = None,
) -> str:
    """Returns the messages as text in the chat template's form; `prompt` adds the beginning of the next answer.

    template: more arguments for transformers' `apply_chat_template`, which passes unknown arguments on
    to the template.

    Raises UserError if the model has no template or if rendering takes too much time or memory, and
    Malformed if the template refuses the messages.
    """
    check_template(model)
    try:
        arguments = {"tokenize": False, "add_generation_prompt": prompt, **(template or {})}
        with _bounded():
            text = str(model.tokenizer.apply_chat_template(messages, **arguments))
    except (MemoryError, TimeoutError) as reason:
        raise too_much(model) from reason
    except Exception as reason:  # a template is a program and may fail in any way
        raise Malformed(f"the chat template refuses it ({first_line(reason)})") from reason
    if len(text) > MAX_GROWTH + 4 * len(str((messages, template))):
        raise too_much(model)
    if not is_whole(text):
        raise Malformed(HALF)
    return text


def chat_prompt(
    model: ChatTokenizer, messages: list[dict[str, Any]], template: Mapping[str, Any] | None = None
) -> str:
    """Returns the text of a prompt; raises UserError if the model's chat template fails or is missing."""
    try:
        return render(model, messages, prompt=True, template=template)
    except Malformed as reason:
        if not is_whole(json.dumps(messages, ensure_ascii=False, default=str)):
            raise UserError(f"the text holds {HALF}", "give whole ones, in UTF-8") from reason
        raise UserError(
            f"the model {model.id!r} cannot take this conversation: {reason}",
            "leave out the system prompt, or the part that the template names",
        ) from reason


@contextmanager
def _bounded() -> Iterator[None]:
    """Raises TimeoutError in a block after MAX_SECONDS, and MemoryError if the block takes MAX_BYTES more memory.

    Both limits are checked every TICK_S seconds, between two operations. In the `medusa` program, the
    system also refuses an operation that would exceed the limit of memory. After the block, an alarm that
    a caller of the Python API had set is restored, with the remaining time. The limits apply only in the
    main thread, because no other thread can be interrupted. A server renders in a separate process (`serve.templates`).
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGALRM) is None:  # None: a handler was set in C
        yield
        return

    started = time.monotonic()
    taken = _memory()

    def check(number: int, frame: Any) -> None:
        if time.monotonic() - started > MAX_SECONDS:
            raise TimeoutError
        if _memory() - taken > MAX_BYTES:
            raise MemoryError

    limits = resource.getrlimit(resource.RLIMIT_AS)
    # The timer repeats, because one check is not enough: Jinja catches exceptions that are raised in its optimizer.
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
    try:
        # No limit can be set if the reserved memory is unknown, as on macOS.
        if process.owned and _memory(reserved=True):
            with suppress(OSError, ValueError):  # the hard limit is lower
                room = _memory(reserved=True) + MAX_BYTES
                resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if process.owned:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        if left:  # an alarm that was due meanwhile is raised now
            left = max(left - (time.monotonic() - started), 1e-6)
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def _memory(reserved: bool = False) -> int:
    """Returns the bytes of memory that the process uses, or has reserved; 0 if the system does not report them.

    Of the memory in use, macOS reports only the peak, in bytes.
    """
    with suppress(OSError):
        sizes = STATM.read_text().split()
        return int(sizes[0 if reserved else 1]) * resource.getpagesize()
    if reserved or sys.platform != "darwin":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def too_much(model: ChatTokenizer) -> UserError:
    fault = f"the chat template of {model.id!r} takes too much time or memory"
    return UserError(fault, "give another @chat_template")


def try_template(model: ChatTokenizer) -> None:
    """Raises UserError if the model's chat template, if any, takes too much time or memory for a short message."""
    if getattr(model.tokenizer, "chat_template", None):
        with suppress(Malformed):  # the template may require other messages
            render(model, [{"role": "user", "content": "a"}], prompt=True)


def check_template(model: ChatTokenizer) -> None:
    """Raises UserError if the model has no chat template."""
    if not getattr(model.tokenizer, "chat_template", None):
        raise no_chat_template(model.id)


def token_ids(model: ChatTokenizer, text: str, *, begin: bool = False) -> list[int]:
    """Returns the token ids of a text. begin: add the special tokens that the tokenizer puts before a text.

    Special tokens that the tokenizer puts after a text, such as an end token, are left out, because an answer follows.

    Raises UserError for text that UTF-8 cannot encode, and for ids beyond the model's vocabulary.
    """
    if not is_whole(text):
        raise UserError(f"the text holds {HALF}", "give whole ones, in UTF-8")
    ids: list[int] = model.tokenizer.encode(text, add_special_tokens=False)
    if begin:
        ids = _begun(model.tokenizer, text, ids)
    if ids and max(ids) >= model.vocab_size:
        fault = f"the tokenizer of {model.id!r} gives token {max(ids)}, and the model has {model.vocab_size:,}"
        raise UserError(fault, "put the tokenizer that belongs to it into its folder")
    return ids


def _begun(tokenizer: Any, text: str, plain: list[int]) -> list[int]:
    """Returns a text's token ids (`plain`), preceded by the special tokens that the tokenizer puts before a text."""
    whole: list[int] = tokenizer.encode(text, add_special_tokens=True)
    if not plain:
        names = ("eos_token_id", "sep_token_id", "bos_token_id")
        end, sep, begin = (getattr(tokenizer, name, None) for name in names)
        ends = {end, sep} - {begin}
        return [token for token in whole if token not in ends]
    for end in range(len(plain), len(whole) + 1):
        if whole[end - len(plain) : end] == plain:
            return whole[:end]
    return whole


def after_answer(
    model: ChatTokenizer, messages: list[dict[str, str]], *, prompt: bool
) -> str | None:
    """Returns the text after the last answer, or None if the template rewrites that answer or the text before it."""
    last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    before = render(model, messages[:last], prompt=True)
    whole = render(model, messages, prompt=prompt)
    answer = messages[last]["content"]
    rest = whole.removeprefix(before)
    # Some tokenizers treat a space as a part of the answer's first token.
    if not rest.startswith(answer):
        rest = rest.lstrip()
    return (
        rest.removeprefix(answer) if whole.startswith(before) and rest.startswith(answer) else None
    )


def encode(
    model: ChatTokenizer, messages: list[dict[str, str]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the token ids of a conversation and the spans [start, end) of its answers with their end tokens.

    Raises UserError for a chat template that is missing or rewrites earlier turns, and Malformed for refused messages.
    """
    tokens: list[int] = []
    spans: list[tuple[int, int]] = []
    text = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index == 0:
            continue
        text = _extend(model, tokens, text, messages[:index], prompt=True)
        start = len(tokens)
        text = _extend(model, tokens, text, messages[: index + 1], prompt=False)
        ends = [at for at in range(start, len(tokens)) if tokens[at] in model.eos_ids]
        # After the end token, templates put a newline, which the model never generates.
        spans.append((start, ends[0] + 1 if ends else len(tokens)))
    return tokens, spans


def _extend(
    model: ChatTokenizer,
    tokens: list[int],
    text: str,
    messages: list[dict[str, str]],
    *,
    prompt: bool,
) -> str:
    """Renders the messages, appends the tokens of the text that follows `text`, and returns the whole text."""
    longer = render(model, messages, prompt=prompt)
    if not longer.startswith(text):
        raise UserError(
            f"the chat template of {model.id!r} rewrites earlier turns, so answers have no fixed span",
            "use @data with single-turn conversations, or data made by `medusa distill`",
        )
    # A piece that is encoded separately may begin with an extra token (Llama's space). If possible,
    # the whole text is encoded and the piece's tokens are taken from it.
    whole = token_ids(model, longer)
    if whole[: len(tokens)] != tokens:
        whole = [*tokens, *token_ids(model, longer[len(text) :])]
    tokens[:] = whole
    return longer


def fit(
    encode: Callable[[list[Message]], list[int]],
    messages: Sequence[Message],
    question: Message,
    *,
    context: int,
    answer: int,
    forgotten: int = 0,
) -> tuple[list[int], int]:
    """Returns the token ids of a prompt that leaves space for an answer, and the number of oldest messages left out.

    A system prompt is kept, and the oldest `forgotten` messages stay left out. The space is for `answer` tokens, but at
    most a quarter of the context. Raises UserError if even the question does not fit.
    """
    system = list(messages[:1]) if messages and messages[0]["role"] == "system" else []
    turns = list(messages[len(system) :])
    tokens = encode([*system, *turns[forgotten:], question])
    free = min(answer, context // 4)
    if len(tokens) + free > context:
        # Space for two answers is left, so that not every later turn drops another message.
        while forgotten < len(turns) and len(tokens) + 2 * free > context:
            forgotten += 2
            tokens = encode([*system, *turns[forgotten:], question])
    if len(tokens) >= context:
        added = " with the system prompt" if system else ""
        fault = f"the question{added} has {len(tokens):,} tokens, the model has a context of {context:,}"
        raise UserError(fault, "ask something shorter")
    return tokens, forgotten


def check_system(backbone: Any, system: str) -> None:
    """Raises UserError for a system prompt that leaves no space for a question."""
    count = len(
        backbone.encode_chat(
            [{"role": "system", "content": system}, {"role": "user", "content": ""}]
        )
    )
    if count >= backbone.max_positions:
        fault = f"the system prompt has {count:,} tokens, the model has a context of {backbone.max_positions:,}"
        raise UserError(fault, "give a shorter one")
