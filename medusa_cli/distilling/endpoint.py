"""Distillation through OpenAI-compatible servers: many conversations at once, retries, token ids computed here."""

import os
import random
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

import requests
import torch

from medusa_cli.backbone.dialogue import Speaker, encode, render, token_ids
from medusa_cli.distilling.distilled import Distilled, Settings
from medusa_cli.distilling.seeds import Seed
from medusa_cli.distilling.tokenizer import Tokenizer
from medusa_cli.errors import UserError
from medusa_cli.runs.usable import Malformed

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

    One that fails is left alone for a while, longer every time, and the others take its work.
    stop() makes waiting and retrying end at once. A key in MEDUSA_API_KEY goes along as a bearer token.
    """

    urls: Sequence[str]
    model: str
    speaker: Tokenizer
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
        # Servers tell their address with and without what all of their paths begin with.
        self._servers = [_Server(url.rstrip("/").removesuffix("/v1")) for url in self.urls]

    @property
    def _session(self) -> requests.Session:
        """This thread's own connections: a session is not made to be shared."""
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.headers.update(self._headers)
        return session

    def check(self) -> list[str]:
        """Say which servers do not answer, and why; UserError, naming the addresses, unless one of them does."""
        silent = []
        for server in self._servers:
            try:
                self._session.get(f"{server.url}/v1/models", timeout=5.0)
            except ValueError as reason:  # what requests raises for addresses it cannot read
                raise UserError(
                    f"@endpoint {server.url} is no address", "give one such as http://localhost:8000"
                ) from reason
            except requests.RequestException as reason:
                silent.append(f"{server.url} does not answer ({type(reason).__name__})")
                self._rest(server, time.monotonic())
        if len(silent) == len(self._servers):
            raise UserError(f"@endpoint {', '.join(silent)}", "start it, or mend the address")
        return silent

    def listed(self) -> list[str]:
        """The names under which a server lists its models; none where it does not say."""
        try:
            found = self._session.get(f"{self._turn().url}/v1/models", timeout=5.0).json()["data"]
            return [str(one["id"]) for one in found]
        except (requests.RequestException, ValueError, KeyError, TypeError):
            return []

    def find(self, names: Sequence[str]) -> None:
        """Take as `model` the first name the servers answer to, asking for one token; UserError if it is none."""
        question = [{"role": "user", "content": "Hello"}]
        reasons = []
        for name in dict.fromkeys(names):
            self.model = name
            try:
                self.answer(question, Settings(max_new_tokens=1))
                return
            except UserError as reason:
                reasons.append(f"{name!r}: {reason.message}")
        raise UserError(
            f"@endpoint {self.urls[0]} does not answer for the model {'; '.join(reasons)}",
            "give the name it serves the model under as @endpoint_model",
        )

    def stop(self) -> None:
        self._stopped.set()

    def answer(self, messages: list[dict[str, str]], settings: Settings, seed: int | None = None) -> tuple[str, bool]:
        """The text that follows, and whether the model ended it itself; UserError once all attempts have failed.

        seed: what draws depend on, where the server heeds it.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "stream": False,
            **({} if seed is None else {"seed": seed}),
        }
        reason = "stopped"
        for attempt in range(self.attempts):
            if self._stopped.is_set():
                break
            server, began, asked_s = self._turn(), time.monotonic(), 0.0
            try:
                address = f"{server.url}/v1/chat/completions"
                reply = self._session.post(address, json=body, timeout=(10.0, self.timeout))
                if reply.status_code == 200:
                    choice = reply.json()["choices"][0]
                    text, ended = str(choice["message"]["content"] or ""), choice.get("finish_reason") != "length"
                    self._worked(server, began)
                    return text, ended
                reason = f"status {reply.status_code}: {reply.text[:200]}"
                if reply.status_code not in PASSING:
                    break
                asked_s = _retry_after(reply.headers.get("Retry-After", ""))
            except (requests.RequestException, ValueError, KeyError, IndexError, TypeError) as fault:
                reason = f"{type(fault).__name__}: {fault}"
            self._rest(server, began, asked_s)
            if attempt + 1 < self.attempts:
                self._stopped.wait(self._until_one_wakes())
        raise UserError(reason, "see the server's log")

    def _turn(self) -> "_Server":
        """The next server that is not left alone, else the one that is to be asked again first."""
        with self._lock:
            now, count = time.monotonic(), len(self._servers)
            self._next = (self._next + 1) % count
            order = [self._servers[(self._next + step) % count] for step in range(count)]
            return min(order, key=lambda one: max(one.wakes, now))

    def _rest(self, server: "_Server", began: float, asked_s: float = 0.0) -> None:
        """Leave a server alone that failed a request begun at `began`: for what it asked for, or longer every time.

        Requests that were under way when it began to fail count as one failure.
        """
        with self._lock:
            if began >= server.wakes:
                pause = min(LONGEST_PAUSE, self.first_pause * 2**server.failures) * random.uniform(0.5, 1.0)
                server.failures += 1
                server.wakes = time.monotonic() + pause
            server.wakes = max(server.wakes, time.monotonic() + min(asked_s, self.timeout))

    def _worked(self, server: "_Server", began: float) -> None:
        """Forget a server's failures, unless they are younger than the request it answered."""
        with self._lock:
            if began >= server.wakes:
                server.failures = 0

    def _until_one_wakes(self) -> float:
        """Seconds until some server may be asked again."""
        with self._lock:
            return max(0.0, min(server.wakes for server in self._servers) - time.monotonic())


@dataclass
class _Server:
    """One server: when it may be asked again (of time.monotonic), and how often in a row it failed."""

    url: str
    wakes: float = 0.0
    failures: int = 0


def _retry_after(value: str) -> float:
    """Seconds for which a server asks to be left alone, by a Retry-After header of seconds or a date; 0 without."""
    if value.isdigit():
        return float(value)
    try:
        return (parsedate_to_datetime(value) - datetime.now(timezone.utc)).total_seconds()
    except (ValueError, TypeError):  # no date, or one without a zone
        return 0.0


def distill_endpoint(
    endpoint: Endpoint,
    seeds: Sequence[Seed],
    settings: Settings,
    *,
    concurrency: int = 8,
    on_tokens: Callable[[int], None] = lambda count: None,
    on_skip: Callable[[Seed], None] = lambda seed: None,
) -> Iterator[Distilled | Failed]:
    """Let the servers answer every seed's turns one after another, `concurrency` conversations at a time.

    Conversations come as they finish, without states: training computes those. A seed fails alone. As with the
    local engine, on_skip gets the first prompts that leave no room for an answer in settings.capacity positions.
    """
    waiting = deque(seeds)
    running: set[Future[Distilled | Failed | Seed]] = set()
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        try:
            while waiting or running:
                done: set[Future[Distilled | Failed | Seed]] = set()
                if running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                # The servers get their next question before anything is written down: they must not idle.
                while waiting and len(running) < concurrency:
                    running.add(pool.submit(_converse, endpoint, waiting.popleft(), settings))
                for future in done:
                    made = future.result()
                    if isinstance(made, Seed):
                        on_skip(made)
                        continue
                    if isinstance(made, Distilled):
                        on_tokens(sum(end - start for start, end in made.spans))
                    yield made
        finally:
            endpoint.stop()


def _converse(endpoint: Endpoint, seed: Seed, settings: Settings) -> Distilled | Failed | Seed:
    """One seed's turns, each answer becoming history of the next; the seed itself where its prompt is too long.

    A later turn that there is no room for ends the conversation: servers differ in what they do beyond the context.
    """
    messages: list[dict[str, str]] = [] if seed.system is None else [{"role": "system", "content": seed.system}]
    ended: list[bool] = []
    try:
        for turn in seed.turns[: settings.max_turns]:
            messages.append({"role": "user", "content": turn})
            if not _fits(endpoint.speaker, messages, settings):
                if not ended:
                    return seed
                messages.pop()
                break
            text, whole = endpoint.answer(messages, settings, _draws(seed, settings))
            messages.append({"role": "assistant", "content": text})
            ended.append(whole)
        return with_tokens(endpoint.speaker, seed.id, messages, ended)
    except (UserError, Malformed) as reason:
        return Failed(seed.id, str(reason))


def _draws(seed: Seed, settings: Settings) -> int | None:
    """What the draws of a conversation depend on, small enough for any server; None where nothing is drawn."""
    if settings.temperature == 0:
        return None
    return zlib.crc32(f"{settings.random_seed}:{seed.id}".encode()) >> 1


def _fits(speaker: Tokenizer, messages: list[dict[str, str]], settings: Settings) -> bool:
    """Whether an answer still fits after a prompt."""
    room = min(settings.capacity, speaker.max_positions) - settings.max_new_tokens
    # As with the local engine: far too long prompts are not worth tokenising.
    if len(messages[-1]["content"]) > 8 * settings.capacity:
        return False
    text = render(speaker, messages, prompt=True)
    return len(token_ids(speaker, text)) <= room


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
