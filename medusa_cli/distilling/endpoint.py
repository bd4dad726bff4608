"""Distillation through OpenAI-compatible servers: many conversations at once, retries, token ids computed here."""

import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import requests
import torch

from medusa_cli.backbone.dialogue import Malformed, Speaker, encode
from medusa_cli.distilling.engine import Distilled, Settings
from medusa_cli.distilling.seeds import Seed
from medusa_cli.errors import UserError

ATTEMPTS = 8
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
# Busy or broken for the moment; any other refusal will be the same next time.
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
KEY = "MEDUSA_API_KEY"


@dataclass(frozen=True)
class Failed:
    """A seed that got no usable answer, and why."""

    id: str
    reason: str


@dataclass
class Endpoint:
    """Servers that serve one model under `model`, asked in turn; `speaker` lays out its conversations.

    stop() makes waiting and retrying end at once. A key in MEDUSA_API_KEY goes along as a bearer token.
    """

    urls: Sequence[str]
    model: str
    speaker: Speaker
    timeout: float = 600.0
    attempts: int = field(default_factory=lambda: ATTEMPTS)
    first_pause: float = field(default_factory=lambda: FIRST_PAUSE)
    _next: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        key = os.environ.get(KEY)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._local = threading.local()
        self._lock = threading.Lock()

    @property
    def _session(self) -> requests.Session:
        """This thread's own connections: a session is not made to be shared."""
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.headers.update(self._headers)
        return session

    def check(self) -> None:
        """UserError, naming the address, unless every server answers at all."""
        for url in self.urls:
            try:
                self._session.get(f"{url}/v1/models", timeout=5.0)
            except ValueError as reason:  # what requests raises for addresses it cannot read
                raise UserError(f"--endpoint {url} is no address", "give one such as http://localhost:8000") from reason
            except requests.RequestException as reason:
                why = type(reason).__name__
                raise UserError(
                    f"--endpoint {url} does not answer ({why})", "start it, or mend the address"
                ) from reason

    def stop(self) -> None:
        self._stopped.set()

    def answer(self, messages: list[dict[str, str]], settings: Settings) -> tuple[str, bool]:
        """The text that follows, and whether the model ended it itself; UserError once all attempts have failed."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "stream": False,
        }
        reason = "stopped"
        for attempt in range(self.attempts):
            if self._stopped.is_set():
                break
            try:
                address = f"{self._turn()}/v1/chat/completions"
                reply = self._session.post(address, json=body, timeout=(10.0, self.timeout))
                if reply.status_code == 200:
                    choice = reply.json()["choices"][0]
                    return str(choice["message"]["content"] or ""), choice.get("finish_reason") != "length"
                reason = f"status {reply.status_code}: {reply.text[:200]}"
                if reply.status_code not in PASSING:
                    break
            except (requests.RequestException, ValueError, KeyError, IndexError, TypeError) as fault:
                reason = f"{type(fault).__name__}: {fault}"
            pause = min(LONGEST_PAUSE, self.first_pause * 2**attempt) * random.uniform(0.5, 1.0)
            self._stopped.wait(pause)
        raise UserError(reason, "see the server's log")

    def _turn(self) -> str:
        with self._lock:
            self._next += 1
            return self.urls[self._next % len(self.urls)]


def distill_endpoint(
    endpoint: Endpoint,
    seeds: Sequence[Seed],
    settings: Settings,
    *,
    concurrency: int = 8,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Iterator[Distilled | Failed]:
    """Let the servers answer every seed's turns one after another, `concurrency` conversations at a time.

    Conversations come as they finish, without states: training computes those. A seed fails alone.
    """
    waiting = deque(seeds)
    running: set[Future[Distilled | Failed]] = set()
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < concurrency:
                    running.add(pool.submit(_converse, endpoint, waiting.popleft(), settings))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    made = future.result()
                    if isinstance(made, Distilled):
                        on_tokens(sum(end - start for start, end in made.spans))
                    yield made
        finally:
            endpoint.stop()


def _converse(endpoint: Endpoint, seed: Seed, settings: Settings) -> Distilled | Failed:
    """One seed's turns, each answer becoming history of the next."""
    messages: list[dict[str, str]] = [] if seed.system is None else [{"role": "system", "content": seed.system}]
    ended: list[bool] = []
    try:
        for turn in seed.turns[: settings.max_turns]:
            messages.append({"role": "user", "content": turn})
            text, whole = endpoint.answer(messages, settings)
            messages.append({"role": "assistant", "content": text})
            ended.append(whole)
        return with_tokens(endpoint.speaker, seed.id, messages, ended)
    except (UserError, Malformed) as reason:
        return Failed(seed.id, str(reason))


def with_tokens(speaker: Speaker, id: str, messages: list[dict[str, str]], ended: Sequence[bool]) -> Distilled:
    """Token ids and spans of answered messages; an answer cut by the length limit has no end token of its own.

    Malformed where the ids do not give the answers' text back.
    """
    tokens, spans = encode(speaker, messages)
    answers = [one["content"] for one in messages if one["role"] == "assistant"]
    kept = []
    for (start, end), whole, text in zip(spans, ended, answers, strict=True):
        last = end if whole or tokens[end - 1] not in speaker.eos_ids else end - 1
        back = speaker.tokenizer.decode(tokens[start:last], skip_special_tokens=True)
        if last - start < 1 or back.strip() != text.strip():
            raise Malformed("its token ids do not give the text back")
        kept.append((start, last))
    return Distilled(id, messages, tokens, kept, torch.empty(0, 0))


class Tokenizer:
    """A model's tokenizer and sizes without its weights: what distilling through a server needs of it."""

    def __init__(self, model: str) -> None:
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        from medusa_cli import assets

        source = assets.model_dir(model)
        self.id = model
        try:
            config = AutoConfig.from_pretrained(source).get_text_config()
            self.tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as reason:
            raise UserError(
                f"--model {model!r}: its tokenizer could not be loaded: {str(reason).splitlines()[0]}",
                "give the folder or hub id of the model that the server serves",
            ) from reason
        try:
            generation: Any = GenerationConfig.from_pretrained(source)
        except OSError:
            generation = None
        ids: set[int] = set()
        for owner in (generation, config, self.tokenizer):
            found = getattr(owner, "eos_token_id", None)
            ids.update(found if isinstance(found, list) else [] if found is None else [found])
        self.eos_ids = frozenset(ids)
        self.hidden_size: int = config.hidden_size
        self.identity = {
            "id": model,
            "architecture": config.model_type,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "layers": config.num_hidden_layers,
            "fingerprint": None,  # of the weights, which are elsewhere
        }
