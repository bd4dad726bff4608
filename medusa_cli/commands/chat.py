"""Speed and acceptance of an answer, for people and for machines."""

import io
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_cli import console
from medusa_cli.errors import INTERRUPTED, UsageError, UserError, in_flags, of_system
from medusa_cli.options import DraftFlags, LoadFlags, OutputFlags, SamplingFlags, follow_choice, load
from medusa_cli.runs.io import Document, write_json

if TYPE_CHECKING:
    from medusa_cli.api import Medusa
    from medusa_cli.decode import Sampling, Stats
    from medusa_cli.model.chat_template import Message


def figures(stats: "Stats") -> Document:
    """What --json says of an answer."""
    return {
        "tokens": stats.tokens,
        "seconds": round(stats.seconds, 4),
        "tokens_per_s": round(stats.tokens_per_s, 2),
        "steps": stats.steps,
        "acceptance_rate": round(stats.acceptance_rate, 4),
    }


def status(stats: "Stats") -> str:
    """Speed and acceptance in one line."""
    return (
        f"{stats.tokens} tokens, {stats.tokens_per_s:.1f} tokens/s, {stats.acceptance_rate:.2f} tokens a step "
        f"({stats.steps} steps of {1e3 * stats.step_s:.0f} ms)"
    )


HELP = """/help          this list
/clear         forget the conversation
/save FILE     write the conversation as JSON
/stats         speed and acceptance so far
/system TEXT   set the system prompt and begin anew
/exit          leave (or Ctrl-D); Ctrl-C stops an answer"""


@dataclass
class Session:
    """A conversation: its messages, how it decodes, and the sums of all its answers."""

    medusa: "Medusa"
    sampling: "Sampling"
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    show_accepted: bool = False
    system: str | None = None
    messages: "list[Message]" = field(default_factory=list)
    total: "Stats | None" = None
    forgotten: int = 0  # of the messages, which the model is not told any more
    stopped: bool = False  # whether the last answer was, by Ctrl-C

    def __post_init__(self) -> None:
        self.clear(self.system)

    def converse(self) -> bool:
        """Read lines until the end of input or /exit, answering each; a mistake costs one line, not the session.

        Whether a mistake was made that nobody was there to see.
        """
        ask = sys.stdin.isatty()
        failed = False
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # a byte that is no UTF-8 costs a character
        if ask:
            import readline  # noqa: F401  (line editing and history for input())

            console.info("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
        while True:
            try:
                line = input("> " if ask else "").strip()
            except EOFError:
                return failed
            except KeyboardInterrupt:
                console.err.print()
                continue
            if not line:
                continue
            try:
                if line.startswith("/"):
                    if not self.command(line):
                        return failed
                else:
                    self.answer(line)
            except (UserError, OSError) as reason:
                console.error(in_flags((of_system(reason) if isinstance(reason, OSError) else reason).text))
                failed = not ask

    def command(self, line: str) -> bool:
        """Obey a /command; False to leave."""
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        match word:
            case "/exit" | "/quit":
                return False
            case "/help":
                console.result(HELP)
            case "/clear":
                self.clear(self.system)
                console.info("the conversation is forgotten")
            case "/system":
                self.clear(rest or None)
                console.info("system prompt set; the conversation begins anew" if rest else "system prompt removed")
            case "/stats":
                console.result(status(self.total) if self.total else "nothing was answered yet")
            case "/save":
                if not rest:
                    raise UserError("/save needs a file", "write /save FILE")
                write_json(Path(rest).expanduser(), {"messages": self.messages})
                console.info(f"saved to {rest}")
            case _:
                raise UserError(f"{word} is no command", "/help lists them")
        return True

    def clear(self, system: str | None) -> None:
        """Begin anew with a system prompt, or without one; UserError for one that leaves no room for a question."""
        from medusa_cli.model.chat_template import check_system

        if system:
            check_system(self.medusa.backbone, system)
        self.system, self.forgotten = system, 0
        self.messages = [{"role": "system", "content": system}] if system else []

    def prompt(self, question: "Message") -> list[int]:
        """The token ids to answer, without the oldest turns where the context ends, which is said once for each."""
        from medusa_cli.model.chat_template import fit

        backbone, before = self.medusa.backbone, self.forgotten
        limits = {"context": backbone.max_positions, "answer": self.max_new_tokens, "forgotten": before}
        tokens, self.forgotten = fit(backbone.encode_chat, self.messages, question, **limits)
        if self.forgotten > before:
            turns = (self.forgotten - before) // 2
            console.info(
                f"the model's context of {backbone.max_positions:,} tokens is full: it is not told the oldest {turns} "
                "turns any more (/clear begins anew, /save still has all)"
            )
        return tokens

    def answer(self, text: str, show: bool = True) -> "tuple[str, Stats]":
        """Answer one line, streaming to stdout; Ctrl-C stops it, and what came so far stays in the history."""
        from medusa_cli.decode import Request, Stats

        question, self.stopped = {"role": "user", "content": text}, False
        asked = Request(tuple(self.prompt(question)), self.max_new_tokens, self.sampling, stop_strings=self.stop)
        answer, stats, shown, green = "", Stats(), 0, "bold green" if self.show_accepted else ""
        try:
            with console.footer() as footer, self.medusa.stream(asked) as stream:
                stats = stream.answer.stats
                while (pieces := stream.step()) is not None:
                    answer = stream.answer.text
                    if show:
                        console.stream((piece.text, green if piece.accepted else "") for piece in pieces)
                        shown += sum(len(piece.text) for piece in pieces)
                        footer.show(status(stats))
        except KeyboardInterrupt:
            self.stopped = True
            console.err.print(" (stopped)", style="dim")
        if show:
            console.stream([(answer[shown:] + "\n", "")])
            console.info(status(stats))
        self.messages += [question, {"role": "assistant", "content": answer}]
        self.total = (self.total or Stats()).__iadd__(stats)
        return answer, stats


MAX_NEW_TOKENS = 512


def chat(
    *,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Answer this once and leave.")] = None,
    drafting: DraftFlags,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Plain decoding, one token a step.")] = False,
    show_accepted: Annotated[
        bool, typer.Option("--show-accepted", help="Colour the drafted tokens that were accepted, step by step.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End an answer at this text; may be repeated.")
    ] = None,
    rules: SamplingFlags,
    place: LoadFlags,
    said: OutputFlags,
) -> None:
    """Chat with a model, its answers streaming as they are verified.

    Typed bare it takes the default model with the drafter that ships. Lines piped in are answered one after
    another.
    """
    said.configure()
    if said.json and prompt is None:
        raise UsageError("--json needs --prompt", "give --prompt TEXT")
    if prompt is not None and not prompt.strip():
        raise UsageError("--prompt is empty", "give a text")
    from medusa_cli.api import Medusa

    choice, rule = drafting.or_plain(baseline), rules.sampled
    medusa = Medusa(load(choice, follow_choice(choice, place)))
    session = Session(medusa, rule, rules.max_new_tokens or MAX_NEW_TOKENS, tuple(stop or ()), show_accepted, system)
    if prompt is None:
        raise typer.Exit(1 if session.converse() else 0)
    text, stats = session.answer(prompt, show=not said.json)
    if said.json:
        console.emit_json({"prompt": prompt, "answer": text, **figures(stats)})
    if session.stopped:
        raise typer.Exit(INTERRUPTED)
