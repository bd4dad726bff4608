"""Other programs in a bench: servers of OpenAI's protocol, and whose plain decoding is whose."""

import json
import os
import re
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from medusa_cli.bench.methods import LLAMA, METHODS, TRANSFORMERS, Method, OnTokens
from medusa_cli.bench.stats import Measurement
from medusa_cli.errors import UsageError, UserError, first_line
from medusa_cli.model import Backbone

NAME = re.compile(r"[A-Za-z0-9][\w.]*(-[\w.-]+)?")
KEY = "MEDUSA_API_KEY"  # sent as a bearer token, as `distill` and the judge do


def parse_peers(texts: Sequence[str]) -> dict[str, str]:
    """Returns addresses by name from texts NAME=URL; raises UsageError for another form and for names of methods."""
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
    """Returns the method that decodes as `name` does, but without its drafts; None if it is plain, or not measured.

    Of a peer NAME-DRAFTS that is NAME; of our methods it is ar.
    """
    program = name.partition("-")[0]
    foreign = name in TRANSFORMERS or name in LLAMA or name in peers
    plain = program if foreign else "ar"
    return plain if plain != name and plain in names else None


def server_method(name: str, url: str, backbone: Backbone) -> Method:
    """Returns greedy decoding by a server, which gets the prompts' token ids.

    A server that returns no token ids (`return_token_ids`, as vLLM has it) has its text encoded again.
    """
    ends = sorted(backbone.eos_ids)
    model = _answer(name, f"{url}/v1/models")["data"][0]["id"]

    def answer(
        prompts: Sequence[Sequence[int]], max_new_tokens: int, on_tokens: OnTokens
    ) -> list[Measurement]:
        body = {
            "model": model,
            "prompt": list(prompts[0]),
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        choice = _answer(name, f"{url}/v1/completions", body)["choices"][0]
        tokens = choice.get("token_ids")
        if tokens is None:
            tokens = backbone.tokenizer.encode(choice["text"], add_special_tokens=False)
        # Servers differ in whether the end token counts as one of the answer.
        if choice.get("finish_reason") == "stop" and ends and not {*tokens[-1:]} & {*ends}:
            tokens = [*tokens, ends[0]]
        on_tokens(tokens)
        return [Measurement([tokens])]

    return answer


def _answer(name: str, url: str, body: dict[str, Any] | None = None) -> Any:
    """Returns a server's document; raises UserError, naming the peer, if it gives none."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as reply:
            return json.load(reply)
    except (OSError, ValueError) as reason:
        fault = f"@peer {name}: {url} gave no answer: {first_line(reason)}"
        raise UserError(fault, "start the server, and check its address") from reason
