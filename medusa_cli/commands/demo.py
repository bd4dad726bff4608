"""`medusa demo`: the same questions decoded plain and with drafts, side by side."""

from contextlib import ExitStack
from typing import Annotated, Any

import typer

from medusa_cli import console, options

MAX_NEW_TOKENS = 128
QUESTIONS = 3
LEFT, RIGHT = "hf", "medusa"
HEADINGS = {LEFT: "plain decoding (transformers' generate)", RIGHT: "with drafts (medusa)"}


def demo(
    limit: Annotated[
        int, typer.Option(metavar="N", help="MT-Bench questions, spread over the categories.")
    ] = QUESTIONS,
    max_new_tokens: options.MaxNewTokens = None,
    run: options.RunOrShipped = None,
    model: options.Model = None,
    drafter: options.Drafter = None,
    tree: options.Tree = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    engine: options.Engine = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Watch MT-Bench questions being answered plain and with drafts, and see what it gains.

    Greedy decoding; the closing table is that of `medusa bench`. Under five minutes on two cores.
    """
    console.configure(quiet=quiet, json=json)
    from medusa_cli.assembly import describe
    from medusa_cli.commands.loading import load
    from medusa_cli.runs.resolve import choose

    choice = choose(model, run, drafter, tree)

    from medusa_cli.assets import mt_bench_path
    from medusa_cli.benchmarks import build_methods, measure, read_questions, spread, summarise
    from medusa_cli.commands.measuring import plain_model, show
    from medusa_cli.commands.rounding import follow_choice
    from medusa_cli.decoding.sampling import Sampling
    from medusa_cli.runs.run import provenance

    tokens = max_new_tokens or MAX_NEW_TOKENS
    chosen = spread(read_questions(mt_bench_path())[0], limit)
    console.info(
        f"{len(chosen)} MT-Bench questions, up to {tokens} new tokens a turn; --limit N, --max-new-tokens N take more"
    )
    place: dict[str, Any] = {"device": device, "dtype": dtype, "engine": engine, "trust_remote_code": trust_remote_code}
    place = follow_choice(choice, place)
    made = load(choice, **place)
    backbone, heads, shape = made.backbone, made.drafter, made.shape
    rule = Sampling()
    names = [LEFT, "ar", RIGHT]
    assert heads is not None and shape is not None
    methods = build_methods(names, backbone, plain_model(choice, place, backbone), {"medusa": (heads, shape)}, rule)
    results: list[Any] = []
    with _Stage(backbone, show=not (json or quiet)) as stage:
        for result in measure(backbone, methods, chosen, tokens, watch=stage.tokens):
            results.append(result)
            stage.close_question(result)
    document = {
        "title": "Plain and drafted decoding, greedy",
        "facts": [
            f"{choice.model}, {str(backbone.dtype).removeprefix('torch.')} on {backbone.device}, "
            f"{len(chosen)} questions, {describe(shape)}. ar is our plain loop."
        ],
        **provenance(backbone.identity),
        **summarise(results),
    }
    if json:
        console.emit_json(document)
        return
    show(document)
    same = document["methods"][RIGHT]["identical"] == len(results)
    console.result(
        f"output identical to plain decoding: {'yes' if same else 'no (near-ties in bf16; --dtype fp32 is exact)'}"
    )


class _Stage:
    """Two panels that fill as tokens come on a terminal; the finished answers one below the other elsewhere."""

    def __init__(self, backbone: Any, show: bool) -> None:
        from medusa_cli.decoding.text import TextStream

        self._new_stream = lambda: TextStream(backbone)
        self._show = show
        self._live: Any = None
        self._guard = ExitStack()
        self._clear()

    def _clear(self) -> None:
        self._streams = {name: self._new_stream() for name in (LEFT, RIGHT)}
        self._texts = {name: "" for name in (LEFT, RIGHT)}

    def __enter__(self) -> "_Stage":
        if self._show and console.out.is_terminal:
            from rich.live import Live

            self._guard.enter_context(console.terminated())
            self._live = Live(console=console.out, refresh_per_second=12, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        self._guard.close()

    def tokens(self, name: str, new: list[int]) -> None:
        """Show new tokens of one of the two methods; [] ends an answer."""
        if name in self._texts:
            self._texts[name] += self._streams[name].add(new)
            if not new:  # the answer is over: the next turn's begins on a line of its own
                self._texts[name] += self._streams[name].rest() + "\n\n"
                self._streams[name] = self._new_stream()
            if self._live is not None:
                self._live.update(self._panels(tail=True))

    def close_question(self, result: Any) -> None:
        """Leave the question with both answers and their speed on the screen."""
        if self._show:
            rates = {n: f"{a.tokens / a.seconds:.1f} tokens/s" for n, a in result.answers.items()}
            console.result(f"\n{result.question.category}: {result.question.turns[0]}")
            if self._live is not None:
                self._live.console.print(self._panels(rates=rates))
            else:
                for name, heading in HEADINGS.items():
                    console.result(f"--- {heading}, {rates[name]}\n{self._texts[name].strip()}")
        self._clear()

    def _panels(self, rates: dict[str, str] | None = None, tail: bool = False) -> Any:
        from rich.columns import Columns
        from rich.panel import Panel
        from rich.text import Text

        width = console.out.width // 2 - 1
        # A panel taller than the screen would flicker: while streaming, the last lines are shown.
        room = max(4, console.out.height - 6) * (width - 4)
        panels = []
        for name, heading in HEADINGS.items():
            text = self._texts[name].strip()
            title = f"{heading}, {rates[name]}" if rates else heading
            panels.append(Panel(Text(text[-room:] if tail else text), title=title, width=width))
        return Columns(panels)
