"""`medusa serve`: the model and its drafter behind an OpenAI-compatible HTTP server."""

from pathlib import Path
from typing import Annotated

import typer

from medusa_cli import assets, console, options
from medusa_cli.options import DraftFlags, LoadFlags

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    *,
    drafting: DraftFlags,
    baseline: Annotated[bool, typer.Option("--baseline", help="Plain decoding, one token a step.")] = False,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen at; 0.0.0.0 is all of them.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="The port; 0 is any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="MEDUSA_API_KEY",
            show_envvar=False,
            help="A key that clients must send; may be given more than once. Better set MEDUSA_API_KEY, keys apart by "
            "blanks: others can read command lines.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The model's name in the API. [default: --model's]", show_default=False),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Answers that are decoded side by side.")
    ] = 8,
    queue: Annotated[int, typer.Option(metavar="N", min=0, help="Requests that wait beyond those; more get 429.")] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest prompt, in tokens.")] = 4096,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest answer, in tokens.")] = 2048,
    max_body: Annotated[int, typer.Option(metavar="KIB", min=1, help="Largest body of a request.")] = 1024,
    temperature: options.Temperature = None,
    place: LoadFlags,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Serve a model over HTTP as OpenAI's API does: /v1/chat/completions, /v1/completions, a page at /.

    Requests decode side by side and join and leave at every step. --temperature is that of requests that name none.
    Ctrl-C or SIGTERM lets running answers finish; once more ends them.
    """
    console.configure(quiet)
    assets.need_extra("serve", "medusa serve")
    from medusa_cli.api import Medusa
    from medusa_cli.options import load
    from medusa_cli.runs.run import called
    from medusa_cli.serve.middleware import Limits
    from medusa_cli.serve.server import Server, listen

    listener = listen(host, port)  # before the model is loaded, so that a port in use is reported at once
    choice = drafting.or_plain(baseline)
    loaded = load(choice, place)
    limits = Limits(
        name=name or (called(choice.model) if Path(choice.model).is_dir() else choice.model),
        host=host,
        api_keys=tuple(filter(None, api_key or ())),
        slots=batch_size,
        waiting=queue,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_body=max_body << 10,
        temperature=temperature or 0.0,
    )
    if host not in LOOPBACK and not limits.api_keys:
        console.warn("anybody who reaches this port can use it; MEDUSA_API_KEY or --api-key sets a key")
    server = Server(Medusa(loaded), limits)
    listener.listen()  # before the address is printed
    address = f"[{host}]" if ":" in host else host
    console.info(f"serving {limits.name!r} at http://{address}:{listener.getsockname()[1]}/v1, a page to try it at /")
    server.run(listener)
