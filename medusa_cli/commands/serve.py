"""`medusa serve`: the model and its drafter behind an OpenAI-compatible HTTP server."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from medusa_cli import console, options
from medusa_cli.errors import UsageError, UserError, shown
from medusa_cli.files import extras, fetch
from medusa_cli.options import DraftFlags, LoadFlags

if TYPE_CHECKING:
    from medusa_cli.loading import LoadedModel
    from medusa_cli.model import Backbone

# Tokens that the default context has at least, and rows that a slot needs beyond it for drafts.
MIN_CONTEXT = 4096
SPARE_ROWS = 256
STORE_GB = 10.0
HOST = "127.0.0.1"
PORT = 8000
LOOPBACK = ("127.0.0.1", "::1", "localhost")


_access = partial(options.flag, panel="Access")
_limit = partial(options.flag, panel="Limits", min=1, show_default=True)
_CONTEXT = (
    "Longest prompt and answer together, in tokens. [default: the model's, as far as memory allows]"
)
_ANSWER = "Longest answer, in tokens. [default: the rest of the context]"
_STORE = (
    "Folder that keeps the prefix cache beyond restarts, of up to GB gigabytes (10 by default); its files hold the "
    "prompts."
)
_NAME = "The model's name in the API; repeatable, for aliases. [default: the name of --model]"
_HOST = "Address to listen at; 0.0.0.0: all of them."
_ALLOW = "A host name under which clients reach this server, such as that of a proxy; repeatable."
_KEY = (
    "A key that clients must send; repeatable. MEDUSA_API_KEY is safer, as other users can read command lines; "
    "blanks separate its keys."
)
_RECORD = (
    'Append prompts and answers to FILE, as data for `medusa tune --data`. Requests with "record": false or the '
    "header X-Medusa-Record: no are left out. [default: nothing is recorded]"
)
_CORS = (
    "An origin whose web pages may use the server, such as https://chat.example, besides pages of this machine; * is "
    "any. Repeatable."
)


def serve(
    *,
    drafting: DraftFlags,
    baseline: Annotated[
        bool, options.flag("--baseline", "Plain decoding, one token per step.")
    ] = False,
    batch_size: Annotated[int, _limit("--batch-size N", "Answers decoded at the same time.")] = 8,
    queue: Annotated[
        int,
        _limit("--queue N", "Requests that wait for a place; further ones get status 429.", min=0),
    ] = 64,
    context: Annotated[
        int | None, options.flag("--context N", _CONTEXT, panel="Limits", min=2)
    ] = None,
    max_new_tokens: Annotated[
        int | None, options.flag("--max-new-tokens N", _ANSWER, panel="Limits", min=1)
    ] = None,
    max_body: Annotated[int, _limit("--max-body KIB", "Largest body of a request.")] = 1024,
    prefix_store: Annotated[
        str | None, options.flag("--prefix-store DIR[:GB]", _STORE, panel="Limits")
    ] = None,
    chat_template: options.ChatTemplate = None,
    name: Annotated[list[str] | None, _access("--name NAME", _NAME)] = None,
    host: Annotated[str, _access("--host ADDRESS", _HOST, show_default=True)] = HOST,
    port: Annotated[
        int,
        _access("--port N", "The port; 0 is any free one.", min=0, max=65535, show_default=True),
    ] = PORT,
    allow_host: Annotated[list[str] | None, _access("--allow-host NAME", _ALLOW)] = None,
    uds: Annotated[
        Path | None, _access("--uds FILE", "Listen at a Unix socket in place of --host and --port.")
    ] = None,
    api_key: Annotated[
        list[str] | None, _access("--api-key KEY", _KEY, envvar="MEDUSA_API_KEY", show_envvar=False)
    ] = None,
    cors: Annotated[list[str] | None, _access("--cors ORIGIN", _CORS)] = None,
    ssl_certfile: Annotated[
        Path | None, _access("--ssl-certfile FILE", "Serve HTTPS with this certificate.")
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, _access("--ssl-keyfile FILE", "Its key. [default: in the same file]")
    ] = None,
    record: Annotated[Path | None, _access("--record FILE", _RECORD, dir_okay=False)] = None,
    access_log: Annotated[bool, _access("--access-log", "Print a line for every request.")] = False,
    temperature: options.Temperature = None,
    place: LoadFlags,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Serve a model over HTTP as OpenAI's API does: /v1/chat/completions, /v1/responses, /v1/completions, a page.

    Answers are decoded together, and join and leave at every step. --temperature applies to requests without one.
    Ctrl-C or SIGTERM lets running answers finish; a second one ends them. SIGHUP loads the drafter again for new
    requests.
    """
    console.configure(quiet)
    fetch.progress = console.fetching
    extras.need_extra("serve", "medusa serve")
    from medusa_cli.api import Medusa
    from medusa_cli.files.paths import expanded
    from medusa_cli.loading import with_drafting
    from medusa_cli.options import load
    from medusa_cli.runs.run import called
    from medusa_cli.serve import templates
    from medusa_cli.serve.middleware import Limits
    from medusa_cli.serve.record import Recorder, answerer
    from medusa_cli.serve.server import Server, check_certificate, file_identity, listen

    if quiet and access_log:
        raise UsageError("--access-log has no effect with --quiet", "leave one of them out")
    lists = {"--api-key": api_key, "--name": name, "--allow-host": allow_host, "--cors": cors}
    for flag, words in lists.items():
        if words and not all(word.strip() for word in words):
            raise UsageError(f"{flag} is empty", "give a text, or leave it out")
    for flag, value, usual in (("--host", host, HOST), ("--port", port, PORT)):
        if uds and value != usual:
            raise UsageError(f"{flag} {value} has no effect with --uds", "leave one of them out")
    store = None if prefix_store is None else folder_and_bytes(prefix_store)
    if record is not None and not os.access(record.absolute().parent, os.W_OK | os.X_OK):
        raise UserError(f"--record {record} cannot be written", "give a file in another folder")
    choice = drafting.or_plain(baseline, chat_template)
    check_certificate(ssl_certfile, ssl_keyfile)
    templates.prepare()
    # Before the model is loaded, so that a port in use is reported at once.
    listener = listen(host, port, uds)
    bound = file_identity(uds) if uds else None
    loaded = load(choice, place)
    is_local = expanded(choice.model).exists()
    own_name = called(choice.model) if is_local else choice.model  # clients need not see a path
    slots, longest, share = fitting_limits(loaded.backbone, batch_size, context)
    limits = Limits(
        names=tuple(name or [own_name]),
        host="" if uds else host,
        allowed_hosts=tuple(allow_host or ()),
        api_keys=tuple(api_key or ()),
        slots=slots,
        waiting=queue,
        context=longest,
        share=share,
        max_new_tokens=max_new_tokens,
        max_body=max_body << 10,
        temperature=temperature or 0.0,
        cors=tuple(cors or ()),
        access_log=access_log,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
    )
    if not uds and host not in LOOPBACK and not limits.api_keys:
        console.warn(
            "anybody who reaches this port can use it; MEDUSA_API_KEY or --api-key sets a key"
        )
    medusa = Medusa(loaded)
    if store is not None:
        medusa.keep_prefixes(*store)
    recorder = None
    if record is not None:
        recorder = Recorder(record, answerer(loaded.backbone.identity))
        console.info(
            f"prompts and answers are recorded in {record}; docs/serve.md says what is kept"
        )

    def load_again() -> "LoadedModel":
        return with_drafting(loaded, drafting.or_plain(baseline, chat_template))

    server = Server(medusa, limits, recorder, load_again)
    listener.listen()  # before the address is printed
    engine = loaded.backbone.engine
    size = longest * engine.row_bytes + engine.slot_bytes(SPARE_ROWS)
    what = (
        f"{limits.names[0]!r} with a context of {longest:,} tokens ({size / 1e9:.2g} GB of memory)"
    )
    if uds:
        console.info(f"serving {what} at the socket {uds}")
    else:
        address = f"[{host}]" if ":" in host else host
        port = listener.getsockname()[1]
        scheme = "https" if ssl_certfile else "http"
        console.info(f"serving {what} at {scheme}://{address}:{port}/v1, a page to try it at /")
    server.run(listener)
    medusa.close()
    if uds and file_identity(uds) == bound:  # else another server has bound its own
        uds.unlink(missing_ok=True)


def folder_and_bytes(text: str) -> tuple[Path, int]:
    """Returns the folder and the size that DIR[:GB] names; raises UsageError if there is neither."""
    from medusa_cli.files.paths import expanded

    folder, colon, size = text.rpartition(":")
    gigabytes = STORE_GB
    if not colon or "/" in size:
        folder = text
    else:
        try:
            gigabytes = float(size)
        except ValueError:
            gigabytes = 0
    if not folder.strip() or not 0 < gigabytes < 1e6:
        fault = f"--prefix-store {shown(text)} is no folder with a size"
        raise UsageError(fault, "give DIR, or DIR:GB such as ~/prefixes:20")
    return expanded(folder), int(gigabytes * 1e9)


def fitting_limits(
    backbone: "Backbone", slots: int, context: int | None
) -> tuple[int, int, int | None]:
    """Returns the slots, the context and the share of a request without a limit that fit in the free memory.

    Warns if the memory holds less. In a lazy cache, one sequence may take all memory, and requests that do not fit
    beside the running ones wait. In another cache, every slot is as large as the largest one. context: the number of
    tokens asked for, None for the model's. A share of None is the context.
    """
    from medusa_cli.decode.decoder import MEMORY_SHARE
    from medusa_cli.device import free_memory
    from medusa_cli.engine import Cache

    wanted = min(context or backbone.max_positions, backbone.max_positions)
    cache = backbone.engine.new_cache()
    free = free_memory(backbone.device)
    # Running states take the same memory in every slot, whatever the length.
    fixed = backbone.engine.slot_bytes(SPARE_ROWS)
    row = max(1, backbone.engine.row_bytes)
    asked = slots
    if fixed:
        slots = min(slots, max(1, free // (fixed + min(wanted, MIN_CONTEXT) * row)))
    rows = max(0, free - slots * fixed) // row
    memory = f"{backbone.device} has {free / 1e9:.1f} GB left"
    if cache.lazy:
        longest = max(MIN_CONTEXT, int(MEMORY_SHARE * rows) - SPARE_ROWS)
        if longest < wanted:
            console.warn(f"the context is {longest:,} tokens instead of {wanted:,}: {memory}")
        longest = min(wanted, longest)
        if slots < asked:
            console.warn(f"{slots} answers side by side instead of {asked}: {memory}")
        return slots, longest, None if slots * longest <= rows else rows // slots

    capacity = Cache(layers=1).grown(wanted + SPARE_ROWS)
    if context is None:
        while slots * capacity > rows and capacity > MIN_CONTEXT:
            capacity //= 2
    longest = min(wanted, capacity - SPARE_ROWS)
    fitting = min(slots, max(1, rows // capacity))
    if fitting < asked or longest < wanted:
        console.warn(
            f"{fitting} answers side by side, in a context of {longest:,} tokens: {memory}; a smaller --batch-size "
            "leaves more for the context, a smaller --context for more answers"
        )
    return fitting, longest, None
