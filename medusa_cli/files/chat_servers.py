"""A client for OpenAI-compatible chat servers, which asks several addresses in turn and retries after pauses."""

import os
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import requests

from medusa_cli.errors import UserError

ATTEMPTS = 8
# Seconds before the first retry, and the longest pause in seconds.
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
# Timeouts in seconds for connecting, for an answer, and for a list of models.
CONNECT_S = 10.0
ANSWER_S = 600.0
LIST_S = 5.0
# Status codes of temporary failures. A request that fails with any other code would fail again.
TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504}
KEY = "MEDUSA_API_KEY"


class _Session(threading.local):
    """Holds the connections of one thread, because threads must not share a session."""

    def __init__(self) -> None:
        self.http = requests.Session()
        if key := os.environ.get(KEY):
            self.http.headers["Authorization"] = f"Bearer {key}"


class ChatServers:
    """Asks servers of one model in turn; after each failure in a row, a server is skipped for longer.

    urls: addresses with or without /v1. flag: the setting to which errors refer. A key in MEDUSA_API_KEY is sent as a
    bearer token. Threads may share the object; stop() ends waiting and retrying immediately.
    """

    def __init__(self, urls: Sequence[str], model: str = "", *, flag: str = "@endpoint") -> None:
        self.model = model
        self.flag = flag
        # Rotated with every request, so that the servers take turns.
        self.urls = [url.strip().rstrip("/").removesuffix("/v1") for url in urls]
        self._session = _Session()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        # When each server may be asked again (time.monotonic), and its number of failures in a row.
        self._retry_at = dict.fromkeys(self.urls, 0.0)
        self._failures = dict.fromkeys(self.urls, 0)

    def check(self) -> tuple[list[str], list[str]]:
        """Returns the model names that servers list, and one line per server that does not answer.

        Raises UserError if no server answers, or if an address is invalid.
        """
        names = []
        silent = []
        for url in self.urls:
            try:
                reply = self._session.http.get(f"{url}/v1/models", timeout=LIST_S)
            except ValueError as reason:  # an address that requests cannot parse
                fault = f"{self.flag} {url} is not an address"
                raise UserError(fault, "give one such as http://localhost:8000") from reason
            except requests.RequestException as reason:
                silent.append(f"{url} does not answer ({type(reason).__name__})")
                self._back_off(url, time.monotonic())
                continue
            with suppress(ValueError, KeyError, TypeError):  # a server may list none
                names += [str(model["id"]) for model in reply.json()["data"]]
        if len(silent) == len(self.urls):
            raise UserError(f"{self.flag} {', '.join(silent)}", "start it, or give another address")
        return names, silent

    def stop(self) -> None:
        """Ends waiting and retrying in all threads."""
        self._stopped.set()

    def complete(self, messages: list[dict[str, str]], **options: Any) -> tuple[str, str]:
        """Returns the answer's text and its finish reason; raises UserError if no attempt succeeds.

        options: additional fields of the request, such as max_tokens and temperature.
        """
        body = {"model": self.model, "messages": messages, "stream": False, **options}
        fault = "stopped"
        for attempt in range(ATTEMPTS):
            if self._stopped.is_set():
                break
            url = self._next()
            start = time.monotonic()
            pause = 0.0
            try:
                address = f"{url}/v1/chat/completions"
                reply = self._session.http.post(address, json=body, timeout=(CONNECT_S, ANSWER_S))
                if reply.status_code == 200:
                    choice = reply.json()["choices"][0]
                    answer = (
                        str(choice["message"]["content"] or ""),
                        str(choice.get("finish_reason")),
                    )
                    self._failures[url] = 0
                    return answer
                fault = f"status {reply.status_code}: {reply.text[:200]}"
                if reply.status_code not in TRANSIENT:
                    break
                wait = reply.headers.get("Retry-After", "")
                pause = min(float(wait), ANSWER_S) if wait.isdigit() else 0.0
            except (
                requests.RequestException,
                ValueError,
                KeyError,
                IndexError,
                TypeError,
            ) as reason:
                fault = f"{type(reason).__name__}: {reason}"
            self._back_off(url, start, pause)
            if attempt + 1 < ATTEMPTS:
                self._stopped.wait(min(self._retry_at.values()) - time.monotonic())
        raise UserError(
            f"{self.flag} {', '.join(sorted(self.urls))}: {fault}", "see the server's log"
        )

    def _next(self) -> str:
        """Returns the next server that may be asked now; if all are skipped, the one whose pause ends first."""
        with self._lock:
            self.urls.append(self.urls.pop(0))
            now = time.monotonic()
            return min(self.urls, key=lambda url: max(self._retry_at[url], now))

    def _back_off(self, url: str, start: float, pause: float = 0.0) -> None:
        """Skips a server for `pause` seconds or more after it failed a request that began at `start`.

        The time grows with every failure in a row. Requests that ran at the same time and failed count as one failure.
        """
        with self._lock:
            now = time.monotonic()
            if start >= self._retry_at[url]:
                seconds = min(
                    LONGEST_PAUSE, FIRST_PAUSE * 2 ** self._failures[url]
                ) * random.uniform(0.5, 1.0)
                self._failures[url] += 1
                self._retry_at[url] = now + seconds
            self._retry_at[url] = max(self._retry_at[url], now + pause)
