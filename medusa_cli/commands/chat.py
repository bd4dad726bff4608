"""`medusa chat`: loads a model and streams its answers. An input line that begins with / is a command."""

import io
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medusa_cli import console
from medusa_cli.errors import INTERRUPTED, UsageError, UserError, in_flags, of_system
from medusa_cli.files.io import HALF, is_whole, read_object, write_json
from medusa_cli.files.paths import expanded, home
from medusa_cli.options import (
    Baseline,
    ChatTemplate,
    DraftFlags,
    GrammarFlags,
    LoadFlags,
    OutputFlags,
    SamplingFlags,
    flag,
    load,
    refuse,
)

if TYPE_CHECKING:
    from medusa_cli.api import Chat
    from medusa_cli.decode import Stats

MAX_NEW_TOKENS = 512
# Maximum size in bytes of the folder with cached prefixes, which continued conversations use.
PREFIX_BYTES = 4 * 10**9
_CONTINUE = (
    "Continue the conversation in FILE, or start one, and save it there after each turn. With the native engine, the "
    "keys and values of its tokens are kept in the cache folder, so that they need not be computed again."
)
HELP = """/help          this list
/clear         forget the conversation
/save FILE     write the conversation as JSON
/stats         speed and acceptance so far
/system TEXT   set the system prompt and start over
/exit          leave (or Ctrl-D); Ctrl-C stops an answer"""


@dataclass(frozen=True)
class ConversationFlags:
    """Holds the flags for the conversation, and for the display of answers."""

    prompt: Annotated[str | None, flag("--prompt TEXT", "Answer this prompt and exit.")] = None
    system: Annotated[str | None, flag("--system TEXT", "System prompt.")] = None
    kept_in: Annotated[Path | None, flag("--continue FILE", _CONTINUE)] = None
    baseline: Baseline = False
    show_accepted: Annotated[bool, flag("--show-accepted", "Color accepted draft tokens.")] = False
    chat_template: ChatTemplate = None
    raw: Annotated[
        bool,
        flag("--raw", "Let the model continue each text, without chat template or earlier turns."),
    ] = False
    stop: Annotated[
        list[str] | None, flag("--stop TEXT", "End an answer at this text; may be repeated.")
    ] = None

    def __post_init__(self) -> None:
        """Raises UsageError for texts that are empty or hold half a character, and for flags without effect."""
        if self.prompt is not None and not self.prompt.strip():
            raise UsageError("--prompt is empty", "give a text")
        for name, text in (("--prompt", self.prompt), ("--system", self.system)):
            if text is not None and not is_whole(text):
                raise UsageError(f"{name} holds {HALF}", "give whole ones, in UTF-8")
        if self.stop and not all(self.stop):
            raise UsageError("--stop is empty", "give a text, or leave it out")
        if self.baseline:
            refuse({"--show-accepted": self.show_accepted}, "has no effect with --baseline")
        if self.raw:
            given = {
                "--system": self.system is not None,
                "--chat-template": self.chat_template,
                "--continue": self.kept_in,
            }
            refuse(given, "has no effect with --raw")

    def messages(self) -> list[Any]:
        """Returns the messages in the file of --continue, or none if there is no such file.

        Raises UserError if the file holds no messages, and UsageError if --system is given in addition to messages.
        """
        if self.kept_in is None or not self.kept_in.exists():
            return []
        messages = read_object(self.kept_in, "the conversation").get("messages")
        if not isinstance(messages, list) or not all(
            isinstance(message, dict) for message in messages
        ):
            fault = f"--continue {self.kept_in} holds no messages"
            raise UserError(fault, "give a file that --continue or /save wrote")
        if messages and self.system is not None:
            fault = f"--system has no effect on the conversation in --continue {self.kept_in}"
            raise UsageError(fault, "leave it out, or give another file")
        return messages


def chat(
    *,
    talk: ConversationFlags,
    drafting: DraftFlags,
    sampling: SamplingFlags,
    constraint: GrammarFlags,
    loading: LoadFlags,
    printing: OutputFlags,
) -> None:
    """Chat with a model; tokens are printed as soon as they are verified.

    Without options, it uses the default model and the drafter that ships for it. Lines from a pipe are answered one by
    one.
    """
    printing.configure()
    if printing.json:
        if talk.prompt is None:
            raise UsageError("--json needs --prompt", "give --prompt TEXT")
        refuse({"--show-accepted": talk.show_accepted}, "has no effect with --json")
    messages = talk.messages()
    choice = drafting.or_plain(talk.baseline, talk.chat_template)
    from medusa_cli.api import Chat, GenerationOptions, Medusa

    options = GenerationOptions(
        max_new_tokens=sampling.max_new_tokens or MAX_NEW_TOKENS,
        sampling=sampling.sampling,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.random_seed or 0,
        stop=tuple(talk.stop or ()),
        grammar=constraint.grammar,
        raw=talk.raw,
    )
    session = Chat(Medusa(load(choice, loading, chat=not talk.raw)), options, talk.system)
    kept_in = talk.kept_in
    if kept_in is not None:
        session.resume(messages or session.messages)
        # Without the prefix store, a conversation also continues, but its tokens are run again.
        with suppress(UserError):
            session.medusa.keep_prefixes(home() / "prefixes", PREFIX_BYTES)
    try:
        if talk.prompt is None:
            raise typer.Exit(1 if converse(session, talk.show_accepted, kept_in) else 0)
        stopped = answer(session, talk.prompt, talk.show_accepted, kept_in, silent=printing.json)
    finally:
        if kept_in is not None:
            session.medusa.close()
    if printing.json:
        stats = session.last.stats
        figures = {
            "tokens": stats.tokens,
            "seconds": round(stats.seconds, 4),
            "tokens_per_s": round(stats.tokens_per_s, 2),
            "steps": stats.steps,
            "acceptance_length": round(stats.acceptance_length, 4),
        }
        console.emit_json({"prompt": talk.prompt, "answer": session.last.text, **figures})
    if stopped:
        raise typer.Exit(INTERRUPTED)


def answer(
    session: "Chat",
    text: str,
    show_accepted: bool,
    kept_in: Path | None = None,
    silent: bool = False,
) -> bool:
    """Answers one message and streams the answer to stdout; returns True if Ctrl-C stopped the answer.

    kept_in: the file to which the conversation is written afterwards.
    """
    forgotten = session.forgotten
    green = "bold green" if show_accepted else ""
    printed = 0
    stopped = False
    with session.stream(text) as stream, console.footer() as footer:
        if session.forgotten > forgotten:
            console.info(
                f"the context of {session.medusa.backbone.max_positions:,} tokens is full: the oldest "
                f"{(session.forgotten - forgotten) // 2} turns are left out (/clear starts over, /save keeps all)"
            )
        try:
            while (pieces := stream.step()) is not None:
                if not silent:
                    console.stream(
                        (piece.text, green if piece.accepted else "") for piece in pieces
                    )
                    printed += sum(len(piece.text) for piece in pieces)
                    footer(status(stream.answer.stats))
        except KeyboardInterrupt:
            stopped = True
            console.err.print(" (stopped)", style="dim")
    if kept_in is not None:
        write_json(kept_in, {"messages": session.messages})
    if not silent:
        console.stream([(session.last.text[printed:] + "\n", "")])
        console.info(status(session.last.stats))
    return stopped


def status(stats: "Stats") -> str:
    """Returns speed and acceptance in one line."""
    return (
        f"{stats.tokens} tokens, {stats.tokens_per_s:.1f} tokens/s, {stats.acceptance_length:.2f} tokens per step "
        f"({stats.steps} steps of {1e3 * stats.step_s:.0f} ms)"
    )


def converse(session: "Chat", show_accepted: bool, kept_in: Path | None = None) -> bool:
    """Answers lines until the end of input or /exit; returns True if a piped line got no answer."""
    typed = sys.stdin.isatty()
    failed = False
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A byte that is not UTF-8 becomes a replacement character.
        sys.stdin.reconfigure(errors="replace")
    if typed:
        with suppress(ImportError):  # some Pythons lack readline
            import readline  # noqa: F401  (line editing and history for input())

        console.info("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
    while True:
        try:
            line = input("> " if typed else "").strip()
            if line in ("/exit", "/quit"):
                return failed
            if line.startswith("/"):
                command(session, *line.partition(" ")[::2])
            elif line:
                stopped = answer(session, line, show_accepted, kept_in)
                if stopped and not typed:
                    raise typer.Exit(INTERRUPTED)
        except EOFError:
            if typed:
                console.err.print()
            return failed
        except KeyboardInterrupt:
            if not typed:
                raise
            console.err.print()
        except (UserError, OSError) as reason:
            error = of_system(reason) if isinstance(reason, OSError) else reason
            console.error(in_flags(error.text))
            failed = not typed


def command(session: "Chat", word: str, text: str) -> None:
    """Runs a command such as /save; raises UserError for an unknown command."""
    text = text.strip()
    match word:
        case "/help":
            console.result(HELP)
        case "/clear":
            session.clear(session.system)
            console.info("the conversation is forgotten")
        case "/system":
            session.clear(text or None)
            done = "set; the conversation starts over" if text else "removed"
            console.info(f"system prompt {done}")
        case "/stats":
            total = session.total
            console.result(status(total) if total.tokens else "nothing was answered yet")
        case "/save" if text:
            write_json(expanded(text), {"messages": session.messages})
            console.info(f"saved to {text}")
        case "/save":
            raise UserError("/save needs a file", "write /save FILE")
        case _:
            raise UserError(f"{word} is not a command", "/help lists them")
