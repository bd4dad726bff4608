"""`medusa chat`: a streaming session with a model and its drafter."""

from typing import Annotated

import typer

from medusa_cli import console
from medusa_cli.commands.groups import Drafting, Rules, Said, Where
from medusa_cli.commands.loading import follow_choice, load
from medusa_cli.errors import INTERRUPTED, UsageError

MAX_NEW_TOKENS = 512


def chat(
    *,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Answer this once and leave.")] = None,
    drafting: Drafting,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Plain decoding, one token a step.")] = False,
    show_accepted: Annotated[
        bool, typer.Option("--show-accepted", help="Colour the drafted tokens that were accepted, step by step.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End an answer at this text; may be repeated.")
    ] = None,
    rules: Rules,
    place: Where,
    said: Said,
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
    from medusa_cli.commands.session import Session
    from medusa_cli.commands.speed import figures

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
