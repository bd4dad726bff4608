"""`medusa serve`: serves a model and its drafter through an OpenAI-compatible HTTP server."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from medusa_cli import console, options
from medusa_cli.errors import UsageError, UserError, shown
from medusa_cli.files import extras, fetch
from medusa_cli.files.paths import expanded
from medusa_cli.options import DraftFlags, LoadFlags, refuse
from medusa_cli.runs.run import called

if TYPE_CHECKING:
    from medusa_cli.model import Backbone
    from medusa_cli.serve.middleware import Limits
    from medusa_cli.serve.record import Recorder

# The smallest default context in tokens, and the number of rows for draft tokens that a slot has
# beyond its context.
MIN_CONTEXT = 4096
SPARE_ROWS = 256
STORE_GB = 10.0
HOST = "127.0.0.1"
PORT = 8000
LOOPBACK = ("127.0.0.1", "::1", "localhost")


_access = partial(options.flag, panel="Access")
_limit = partial(options.flag, panel="Limits", min=1, show_default=True)
_CONTEXT = "Maximum tokens of a prompt and its answer together. [default: the model's own, as far as memory allows]"
_ANSWER = "Maximum length of an answer, in tokens. [default: the rest of the context]"
_STORE = (
    "Folder that keeps the prefix cache across restarts, up to GB gigabytes (10 by default); its files contain the "
    "prompts."
)
_NAME = "The model's name in the API; repeatable, for aliases. [default: the name of --model]"
_HOST = "Address to listen on; 0.0.0.0: all addresses."
_ALLOW = "A host name under which clients reach this server, such as that of a proxy; repeatable."
_KEY = (
    "A key that clients must send; repeatable. The variable MEDUSA_API_KEY is safer, because other users can read "
    "command lines; it may hold several keys, separated by spaces."
)
_RECORD = (
    'Append prompts and answers to FILE, as data for `medusa tune --data`. Requests with "record": false or the '
    "header X-Medusa-Record: no are left out. [default: nothing is recorded]"
)
_CORS = (
    "An origin whose web pages may use the server, such as https://chat.example, besides pages of this machine; *: "
    "any origin. Repeatable."
)


@dataclass(frozen=True)
class LimitFlags:
    """Holds the flags for the limits of the server, and for the prefix store."""

    batch_size: Annotated[int, _limit("--batch-size N", "Answers decoded in one batch.")] = 8
    queue: Annotated[
        int,
        _limit(
            "--queue N",
            "Maximum number of waiting requests; further requests get status 429.",
            min=0,
        ),
    ] = 64
    context: Annotated[int | None, options.flag("--context N", _CONTEXT, panel="Limits", min=2)] = (
        None
    )
    max_new_tokens: Annotated[
        int | None, options.flag("--max-new-tokens N", _ANSWER, panel="Limits", min=1)
    ] = None
    max_body: Annotated[int, _limit("--max-body KIB", "Maximum size of a request's body.")] = 1024
    prefix_store: Annotated[
        str | None, options.flag("--prefix-store DIR[:GB]", _STORE, panel="Limits")
    ] = None

    def __post_init__(self) -> None:
        self.store  # noqa: B018  (it raises)

    @property
    def store(self) -> tuple[Path, int] | None:
        """Returns the folder of the prefix store and its maximum size in bytes, or None without --prefix-store.

        Raises UsageError for a value that is not valid.
        """
        return None if self.prefix_store is None else folder_and_bytes(self.prefix_store)


@dataclass(frozen=True)
class AccessFlags:
    """Holds the flags for the address, for access, and for the record of answers."""

    name: Annotated[list[str] | None, _access("--name NAME", _NAME)] = None
    host: Annotated[str, _access("--host ADDRESS", _HOST, show_default=True)] = HOST
    port: Annotated[
        int,
        _access(
            "--port N", "Port to listen on; 0: any free port.", min=0, max=65535, show_default=True
        ),
    ] = PORT
    allow_host: Annotated[list[str] | None, _access("--allow-host NAME", _ALLOW)] = None
    uds: Annotated[
        Path | None, _access("--uds FILE", "Listen on a Unix socket instead of --host and --port.")
    ] = None
    api_key: Annotated[
        list[str] | None, _access("--api-key KEY", _KEY, envvar="MEDUSA_API_KEY", show_envvar=False)
    ] = None
    cors: Annotated[list[str] | None, _access("--cors ORIGIN", _CORS)] = None
    ssl_certfile: Annotated[
        Path | None, _access("--ssl-certfile FILE", "Serve HTTPS with this certificate.")
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        _access(
            "--ssl-keyfile FILE",
            "The certificate's private key. [default: in the file of --ssl-certfile]",
        ),
    ] = None
    record: Annotated[Path | None, _access("--record FILE", _RECORD, dir_okay=False)] = None
    access_log: Annotated[bool, _access("--access-log", "Print a line for every request.")] = False

    def __post_init__(self) -> None:
        """Raises UserError for empty texts, for flags without effect, and for a file that cannot be written."""
        for name in ("api_key", "name", "allow_host", "cors"):
            if not all(word.strip() for word in getattr(self, name) or ()):
                raise UsageError(f"@{name} is empty", "give a text, or leave it out")
        if self.uds:
            address = {"--host": (self.host, HOST), "--port": (self.port, PORT)}
            given = {name: own for name, (own, usual) in address.items() if own != usual}
            refuse(given, "has no effect with --uds")
        if self.record and not os.access(self.record.absolute().parent, os.W_OK | os.X_OK):
            fault = f"--record {self.record} cannot be written"
            raise UserError(fault, "give a file in another folder")

    def names(self, model: str) -> tuple[str, ...]:
        """Returns the model's names in the API: those of --name, or else the name of --model without a local path."""
        own = called(model) if expanded(model).exists() else model
        return tuple(self.name or [own])

    def recorder(self, backbone: "Backbone") -> "Recorder | None":
        """Returns the recorder of --record and prints the name of its file; returns None without --record."""
        if self.record is None:
            return None
        from medusa_cli.serve.record import Recorder, answerer

        console.info(
            f"prompts and answers are recorded in {self.record}; docs/serve.md says what is kept"
        )
        return Recorder(self.record, answerer(backbone.identity))

    def address(self, port: int) -> str:
        """Returns where clients find the server that listens at a port."""
        if self.uds:
            return f"the socket {self.uds}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "https" if self.ssl_certfile else "http"
        return f"{scheme}://{host}:{port}/v1, a page to try it at /"


def serve(
    *,
    drafting: DraftFlags,
    baseline: options.Baseline = False,
    limiting: LimitFlags,
    chat_template: options.ChatTemplate = None,
    access: AccessFlags,
    temperature: options.Temperature = None,
    place: LoadFlags,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Serve a model over HTTP, with the APIs of OpenAI, Anthropic, llama.cpp and Ollama, and a web page at /.

    Answers are decoded together; each of them may begin and end at any step. --temperature applies to requests that do
    not give one. Ctrl-C or SIGTERM lets running answers finish; a second signal ends them. SIGHUP loads the drafter
    again for new requests.
    """
    console.configure(quiet)
    fetch.progress = console.fetching
    extras.need_extra("serve", "medusa serve")
    from medusa_cli.api import Medusa
    from medusa_cli.loading import with_drafting
    from medusa_cli.serve import templates
    from medusa_cli.serve.server import Server, check_certificate, file_identity, listen

    if quiet:
        refuse({"--access-log": access.access_log}, "has no effect with --quiet")
    choice = drafting.or_plain(baseline, chat_template)
    check_certificate(access.ssl_certfile, access.ssl_keyfile)
    templates.prepare()
    # The port is opened before the model is loaded, so that a port in use is reported at once.
    listener = listen(access.host, access.port, access.uds)
    bound = file_identity(access.uds) if access.uds else None
    loaded = options.load(choice, place)
    backbone = loaded.backbone
    limits = limits_of(backbone, limiting, access, access.names(choice.model), temperature or 0.0)
    if not access.uds and access.host not in LOOPBACK and not limits.api_keys:
        console.warn(
            "anyone who reaches this port can use it; MEDUSA_API_KEY or --api-key sets a key"
        )
    medusa = Medusa(loaded)
    if limiting.store is not None:
        medusa.keep_prefixes(*limiting.store)
    server = Server(
        medusa,
        limits,
        access.recorder(backbone),
        lambda: with_drafting(loaded, drafting.or_plain(baseline, chat_template)),
    )
    listener.listen()  # before the address is printed
    longest = limits.context or backbone.max_positions
    size = longest * backbone.engine.row_bytes + backbone.engine.slot_bytes(SPARE_ROWS)
    port = 0 if access.uds else listener.getsockname()[1]
    console.info(
        f"serving {limits.names[0]!r} with a context of {longest:,} tokens ({size / 1e9:.2g} GB of memory) "
        f"at {access.address(port)}"
    )
    server.run(listener)
    medusa.close()
    # If the socket file has changed, it belongs to another server and is not deleted.
    if access.uds and file_identity(access.uds) == bound:
        access.uds.unlink(missing_ok=True)


def limits_of(
    backbone: "Backbone",
    limiting: LimitFlags,
    access: AccessFlags,
    names: tuple[str, ...],
    temperature: float,
) -> "Limits":
    """Returns the server's limits. Slots and context also depend on the memory that the model needs."""
    from medusa_cli.serve.middleware import Limits

    slots, longest, share = fitting_limits(backbone, limiting.batch_size, limiting.context)
    return Limits(
        names=names,
        host="" if access.uds else access.host,
        allowed_hosts=tuple(access.allow_host or ()),
        api_keys=tuple(access.api_key or ()),
        slots=slots,
        waiting=limiting.queue,
        context=longest,
        share=share,
        max_new_tokens=limiting.max_new_tokens,
        max_body=limiting.max_body << 10,
        temperature=temperature,
        cors=tuple(access.cors or ()),
        access_log=access.access_log,
        ssl_certfile=access.ssl_certfile,
        ssl_keyfile=access.ssl_keyfile,
    )


def folder_and_bytes(text: str) -> tuple[Path, int]:
    """Returns the folder and the size in bytes that DIR[:GB] names; raises UsageError if either is not valid."""
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
        fault = f"--prefix-store {shown(text)} is not a folder with a size"
        raise UsageError(fault, "give DIR, or DIR:GB such as ~/prefixes:20")
    return expanded(folder), int(gigabytes * 1e9)


def fitting_limits(
    backbone: "Backbone", slots: int, context: int | None
) -> tuple[int, int, int | None]:
    """Returns the number of slots and the context that fit in the free memory, and a share of the memory in tokens.

    The share is what a request without a limit gets; None: the whole context. Warns if less fits than was asked for. In
    a lazy cache, one sequence may take all memory, and a request waits while running requests leave too little. In any
    other cache, every slot is as large as the largest slot. context: the requested number of tokens; None: the model's.
    """
    from medusa_cli.decode.decoder import MEMORY_SHARE
    from medusa_cli.device import free_memory

    wanted = min(context or backbone.max_positions, backbone.max_positions)
    cache = backbone.engine.new_cache()
    free = free_memory(backbone.device)
    # Running states take the same memory in every slot, whatever the length of its sequence.
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
            console.warn(f"{slots} answers at a time instead of {asked}: {memory}")
        return slots, longest, None if slots * longest <= rows else rows // slots

    capacity = cache.grown(wanted + SPARE_ROWS)
    if context is None:
        while slots * capacity > rows and capacity > MIN_CONTEXT:
            capacity //= 2
    longest = min(wanted, capacity - SPARE_ROWS)
    fitting = min(slots, max(1, rows // capacity))
    if fitting < asked or longest < wanted:
        console.warn(
            f"{fitting} answers at a time, with a context of {longest:,} tokens: {memory}; a smaller --batch-size "
            "leaves more for the context, a smaller --context for more answers"
        )
    return fitting, longest, None
