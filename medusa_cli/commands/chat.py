"""`medusa chat`: a streaming session with a model and its drafter."""

import io
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_cli import console, options
from medusa_cli.commands.history import check_system, fit
from medusa_cli.errors import INTERRUPTED, UserError, in_flags

MAX_NEW_TOKENS = 512
HELP = """/help          this list
/clear         forget the conversation
/save FILE     write the conversation as JSON
/stats         speed and acceptance so far
/system TEXT   set the system prompt and begin anew
/exit          leave (or Ctrl-D); Ctrl-C stops an answer"""


def chat(
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Answer this once and leave.")] = None,
    run: options.RunOrShipped = None,
    model: options.Model = None,
    drafter: options.Drafter = None,
    tree: options.Tree = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Plain decoding, one token a step.")] = False,
    show_accepted: Annotated[
        bool, typer.Option("--show-accepted", help="Colour the drafted tokens that were accepted, step by step.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End an answer at this text; may be repeated.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = None,
    sampling: options.SamplingMode = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    random_seed: options.RandomSeed = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    engine: options.Engine = "auto",
    load_in_4bit: options.LoadIn4bit = None,
    load_in_8bit: options.LoadIn8bit = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Chat with a model, its answers streaming as they are verified.

    Typed bare it takes the default model with the drafter that ships. Lines piped in are answered one after
    another.
    """
    from medusa_cli.errors import UsageError

    console.configure(quiet=quiet, json=json)
    if json and prompt is None:
        raise UsageError("--json needs --prompt", "give --prompt TEXT")
    if prompt is not None and not prompt.strip():
        raise UsageError("--prompt is empty", "give a text")
    from medusa_cli.commands.loading import load
    from medusa_cli.commands.rounding import follow_choice
    from medusa_cli.decoding.sampling import sampling_of
    from medusa_cli.runs.resolve import choose

    choice = choose(model, run, drafter, tree, need_drafter=not baseline)
    rule = sampling_of(sampling, temperature, top_p, top_k, random_seed)
    place: dict[str, Any] = {"device": device, "dtype": dtype, "engine": engine}
    place |= {"load_in_4bit": load_in_4bit, "load_in_8bit": load_in_8bit, "trust_remote_code": trust_remote_code}
    made = load(choice, **follow_choice(choice, place))
    session = Session(
        made.backbone,
        made.drafter,
        made.shape,
        rule,
        max_new_tokens or MAX_NEW_TOKENS,
        stop or [],
        show_accepted,
        system=system,
    )
    if system:
        check_system(made.backbone, system)
    session.clear()
    if prompt is None:
        failed = session.converse()
        raise typer.Exit(1 if failed else 0)
    text, stats = session.answer(prompt, show=not json)
    if json:
        console.emit_json({"prompt": prompt, "answer": text, **figures(stats)})
    if session.stopped:
        raise typer.Exit(INTERRUPTED)


@dataclass
class Session:
    """A conversation: its messages, how it decodes, and the sums of all its answers."""

    backbone: Any
    drafter: Any
    tree: Any
    sampling: Any
    max_new_tokens: int
    stop: list[str]
    show_accepted: bool
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    total: Any = None
    decoder: Any = None
    forgotten: int = 0  # of the messages, which the model is not told any more
    stopped: bool = False  # whether the last answer was, by Ctrl-C

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
                console.error(in_flags(reason))
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
                self.clear()
                console.info("the conversation is forgotten")
            case "/system":
                if rest:
                    check_system(self.backbone, rest)
                self.system = rest or None
                self.clear()
                console.info("system prompt set; the conversation begins anew" if rest else "system prompt removed")
            case "/stats":
                console.result(status(self.total) if self.total else "nothing was answered yet")
            case "/save":
                if not rest:
                    raise UserError("/save needs a file", "write /save FILE")
                from medusa_cli.runs.files import write_json

                write_json(Path(rest).expanduser(), {"messages": self.messages})
                console.info(f"saved to {rest}")
            case _:
                raise UserError(f"{word} is no command", "/help lists them")
        return True

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.forgotten = 0

    def prompt(self, question: dict[str, str]) -> list[int]:
        """The token ids to answer, without the oldest turns where the context ends, which is said once for each."""
        context, before = self.backbone.max_positions, self.forgotten
        limits = {"context": context, "answer": self.max_new_tokens, "forgotten": before}
        tokens, self.forgotten = fit(self.backbone.encode_chat, self.messages, question, **limits)
        if self.forgotten > before:
            turns = (self.forgotten - before) // 2
            console.info(
                f"the model's context of {context:,} tokens is full: it is not told the oldest {turns} turns any more "
                "(/clear begins anew, /save still has all)"
            )
        return tokens

    def answer(self, text: str, show: bool = True) -> tuple[str, Any]:
        """Answer one line, streaming to stdout; Ctrl-C stops it, and what came so far stays in the history."""
        from medusa_cli.decoding import Decoder, Stats, answer
        from medusa_cli.decoding.text import TextStream

        question = {"role": "user", "content": text}
        prompt, self.stopped = self.prompt(question), False
        rules = {
            "max_new_tokens": self.max_new_tokens,
            "sampling": self.sampling,
            "stop_strings": self.stop,
        }
        if self.decoder is None:
            self.decoder = Decoder(self.backbone, self.drafter, self.tree)
        steps = answer(self.decoder, prompt, **rules)
        stats, stream, said = Stats(), TextStream(self.backbone), ""
        try:
            with console.footer() as footer:
                for step in steps:
                    stats.add(step)
                    pieces = [(stream.add([token]), i < step.accepted) for i, token in enumerate(step.tokens)]
                    said += "".join(piece for piece, _ in pieces)
                    if show:
                        self._write(pieces)
                        footer.show(status(stats))
        except KeyboardInterrupt:
            self.stopped = True
            console.err.print(" (stopped)", style="dim")
        rest = stream.rest()
        said += rest
        if show:
            self._write([(rest + "\n", False)])
            console.info(status(stats))
        self.messages += [question, {"role": "assistant", "content": said}]
        self.total = stats if self.total is None else self.total.__iadd__(stats)
        return said, stats

    def _write(self, pieces: list[tuple[str, bool]]) -> None:
        """Write pieces of text at once; accepted drafts in colour when asked for."""
        console.stream((text, "bold green" if accepted and self.show_accepted else "") for text, accepted in pieces)


def figures(stats: Any) -> dict[str, Any]:
    """What --json says of an answer."""
    return {
        "tokens": stats.tokens,
        "seconds": round(stats.seconds, 4),
        "tokens_per_s": round(stats.tokens_per_s, 2),
        "steps": stats.steps,
        "acceptance_rate": round(stats.acceptance_rate, 4),
    }


def status(stats: Any) -> str:
    """Speed and acceptance in one line."""
    return (
        f"{stats.tokens} tokens, {stats.tokens_per_s:.1f} tokens/s, {stats.acceptance_rate:.2f} tokens a step "
        f"({stats.steps} steps of {1e3 * stats.step_s:.0f} ms)"
    )
