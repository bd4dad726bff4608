"""Other programs in a bench (llama.cpp, servers), and the plain counterpart of each method."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch

from medusa_cli.bench.methods import LLAMA, METHODS, TRANSFORMERS, Method, OnTokens
from medusa_cli.bench.stats import Measurement
from medusa_cli.decode import Sampling, Stats
from medusa_cli.errors import UsageError, UserError, first_line
from medusa_cli.files.catalogue import MODELS
from medusa_cli.files.chat_servers import KEY
from medusa_cli.files.extras import has_package
from medusa_cli.files.gguf_header import is_gguf
from medusa_cli.files.paths import expanded
from medusa_cli.model import Backbone

NAME = re.compile(r"[A-Za-z0-9][\w.]*(-[\w.-]+)?")
ANSWER_S = 3600.0  # maximum seconds for a peer's answer


def parse_peers(texts: Sequence[str]) -> dict[str, str]:
    """Parses strings NAME=URL into URLs by name; raises UsageError if a string is invalid or a name is taken."""
    peers = {}
    for text in texts:
        name, _, url = text.partition("=")
        if not NAME.fullmatch(name) or not url.startswith(("http://", "https://")):
            raise UsageError(f"@peer {text!r} is not valid", "use NAME=http://HOST:PORT")
        if name in METHODS or name in peers:
            raise UsageError(f"@peer {name!r} is the name of another method", "use another name")
        peers[name] = url.rstrip("/").removesuffix("/v1")
    return peers


def plain_of(name: str, names: Sequence[str], peers: Mapping[str, str]) -> str | None:
    """Returns the method that decodes like `name` but without drafts.

    For a peer NAME-DRAFTS, the plain method is NAME. For our methods, it is ar. Returns None if
    `name` is plain itself, or if its plain method is not measured.
    """
    program = name.partition("-")[0]
    foreign = name in TRANSFORMERS or name in LLAMA or name in peers
    plain = program if foreign else "ar"
    return plain if plain != name and plain in names else None


def check_reader(name: str, model: str, gguf: Path | None, sampling: Sampling) -> None:
    """Raises UsageError if llama.cpp cannot be compared.

    This is the case if llama.cpp is not installed, if no GGUF file is known, if decoding is not
    greedy, or if the given file is of another format.
    """
    if not has_package("xllamacpp"):
        fault = f"@methods {name}: xllamacpp is not installed"
        raise UsageError(fault, "`pip install xllamacpp`, or leave the method out")
    if gguf is None and model not in MODELS and not expanded(model).is_file():
        raise UsageError(f"@methods {name}: no GGUF file of {model!r} is known", "give @gguf FILE")
    if not sampling.greedy:
        fault = f"@methods {name} is compared in greedy decoding only"
        raise UsageError(fault, "leave @temperature out")
    if gguf is not None and not is_gguf(gguf):
        raise UsageError(f"@gguf {gguf} is not a GGUF file", "give another one")


# A program with the arguments FILE CONTEXT THREADS NGRAM. It prints its address, and serves a GGUF file until its
# standard input closes.
LLAMA_SERVER = """
import sys
import xllamacpp

file, context, threads, ngram = sys.argv[1:]
settings = xllamacpp.CommonParams()
settings.model.path = file
settings.n_ctx = int(context)
settings.n_parallel = 1
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = int(threads)
settings.verbosity = 0
settings.cache_ram_mib = 0
if ngram == "True":
    kinds = xllamacpp.common_speculative_type
    settings.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
try:
    server = xllamacpp.Server(settings)
except RuntimeError as reason:
    sys.exit(str(reason))
print(server.listening_address, flush=True)
sys.stdin.read()
"""


def llama_facts() -> str:
    """Returns a line about llama.cpp's package: version, threads, and the instructions for which it is built."""
    import xllamacpp  # type: ignore[import-not-found, import-untyped, unused-ignore]

    built = re.findall(r"(\w+) = 1", xllamacpp.get_system_info())
    version = importlib.metadata.version("xllamacpp")
    threads = torch.get_num_threads()
    return f"llama.cpp: xllamacpp {version}, a process of its own, {threads} threads, built for {' '.join(built)}."


def _llama_server(name: str, gguf: Path, backbone: Backbone) -> str:
    """Starts llama.cpp's server in a process of its own, which ends with this process; returns its address."""
    words = [str(gguf), str(backbone.max_positions), str(torch.get_num_threads())]
    command = [sys.executable, "-c", LLAMA_SERVER, *words, str(name == "llama.cpp-ngram")]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    address = process.stdout.readline().strip()
    if address:
        return address
    reason = process.stderr.read().strip().splitlines()
    fault = f"llama.cpp cannot load {gguf}: {reason[-1] if reason else 'its server ended'}"
    raise UserError(fault, "give another @gguf FILE")


def llama_method(name: str, gguf: Path, backbone: Backbone, cached: bool = False) -> Method:
    """Returns the method that decodes a GGUF file greedily with the llama.cpp server of the package xllamacpp.

    The file holds the same model. The server runs in a process of its own, with as many threads as
    torch. llama.cpp-ngram adds llama.cpp's n-gram drafts with their default settings. cached: the
    server keeps prefixes.
    """
    address = _llama_server(name, gguf, backbone)
    kind = {"Content-Type": "application/json"}
    options = {"temperature": 0.0, "top_k": 1, "cache_prompt": cached, "return_tokens": True}
    # The server is on this machine, so no proxy must be used.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answer(
        prompts: Sequence[Sequence[int]], max_new_tokens: int, on_tokens: OnTokens
    ) -> list[Measurement]:
        body = json.dumps(
            {"prompt": list(prompts[0]), "n_predict": max_new_tokens, **options}
        ).encode()
        request = urllib.request.Request(f"{address}/completion", body, kind)
        # Streams, and the server's calls without HTTP, leave out tokens that end inside a
        # character.
        with opener.open(request) as reply:
            document = json.load(reply)
        tokens: list[int] = document["tokens"]
        on_tokens(tokens)
        timings = document["timings"]
        stats = Stats(
            drafted=timings.get("draft_n", 0), accepted=timings.get("draft_n_accepted", 0)
        )
        first = [timings["prompt_ms"] / 1e3]
        reused = [timings.get("cache_n", 0)]
        return [Measurement([tokens], stats=stats, first_token_s=first, cached=reused)]

    return answer


def server_method(name: str, url: str, backbone: Backbone, cached: bool = False) -> Method:
    """Returns the method that decodes greedily on a server, which receives token ids and streams its answers.

    If the server returns no token ids (`return_token_ids`, as in vLLM), its text is tokenized
    again. cached: a server of llama.cpp keeps prefixes.
    """
    ends = backbone.eos_ids
    usual = backbone.tokenizer.eos_token_id
    end = usual if usual in ends else min(ends, default=None)
    model = _served_name(name, url, backbone)

    def answer(
        prompts: Sequence[Sequence[int]], max_new_tokens: int, on_tokens: OnTokens
    ) -> list[Measurement]:
        body = {
            "model": model,
            "prompt": list(prompts[0]),
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "return_token_ids": True,
            "stream": True,
            # By default, all methods read each prompt from its start. llama.cpp's server would
            # reuse the last prompt.
            "cache_prompt": cached,
        }
        text = ""
        tokens: list[int] = []
        finish = None
        for choice in _stream(name, f"{url}/v1/completions", body):
            piece = choice.get("text") or ""
            new = choice.get("token_ids")
            text += piece
            tokens += new or []
            finish = choice.get("finish_reason") or finish
            if new or piece:
                on_tokens(new or backbone.tokenizer.encode(piece, add_special_tokens=False))
        if not tokens:
            tokens = backbone.tokenizer.encode(text, add_special_tokens=False)
        # Servers differ in whether the end token is part of the answer.
        if finish == "stop" and end is not None and not ends & {*tokens[-1:]}:
            tokens = [*tokens, end]
        return [Measurement([tokens])]

    return answer


def _served_name(name: str, url: str, backbone: Backbone) -> str:
    """Returns the name under which a server answers for the model.

    The name is the model's own, its folder, or the first listed name that the server accepts: some
    servers list models that they have not loaded. Raises UserError if the server accepts none of
    these names.
    """
    listed = served_models(name, url)
    folder = [str(Path(backbone.id).resolve())] if Path(backbone.id).is_dir() else []
    body = {"prompt": [0], "max_tokens": 1}
    reasons = []
    for model in dict.fromkeys([backbone.id, *folder, *listed]):
        try:
            _answer(name, f"{url}/v1/completions", "choices", {"model": model, **body})
            return model
        except UserError as reason:
            reasons.append(reason)
    raise reasons[-1]


def served_models(name: str, url: str) -> list[str]:
    """Returns the names of the models that a server lists; raises UserError if it lists none."""
    return [str(entry.get("id")) for entry in _answer(name, f"{url}/v1/models", "data")]


def _stream(name: str, url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the first choice of each chunk in a server's stream; raises UserError if no chunk has a choice."""
    count = 0
    with _named(name, url), urllib.request.urlopen(_request(url, body), timeout=ANSWER_S) as reply:
        for line in reply:
            data = line.removeprefix(b"data:").strip()
            if data == line.strip() or data == b"[DONE]":
                continue
            # The last chunk may hold only the usage.
            for choice in json.loads(data).get("choices", [])[:1]:
                count += 1
                yield choice
    if not count:
        fault = f"@peer {name}: the answer of {url} is not a stream of choices"
        raise UserError(fault, "give the address of an OpenAI-compatible server")


def _request(url: str, body: dict[str, Any] | None) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    return urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)


@contextmanager
def _named(name: str, url: str) -> Iterator[None]:
    """Turns a failed request into a UserError that names the peer."""
    try:
        yield
    except (OSError, ValueError, AttributeError, HTTPException) as reason:
        fault = f"@peer {name}: {url} gave no answer: {first_line(reason)}"
        raise UserError(fault, "start the server, and check its address") from reason


def _answer(
    name: str, url: str, field: str, body: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Returns the objects in a field of a server's JSON reply; raises UserError, naming the peer, if there are none."""
    with _named(name, url), urllib.request.urlopen(_request(url, body), timeout=ANSWER_S) as reply:
        document = json.load(reply)
    entries = document.get(field) if isinstance(document, dict) else None
    if isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries):
        return entries
    fault = f"@peer {name}: the answer of {url} has no {field}"
    raise UserError(fault, "give the address of an OpenAI-compatible server")
