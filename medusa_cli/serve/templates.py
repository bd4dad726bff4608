"""Rendering of chat templates in a separate process, because a thread cannot be interrupted or limited in memory."""

import multiprocessing
import signal
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from medusa_cli.errors import UserError
from medusa_cli.files import process
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import chat_prompt, too_much

# Maximum seconds until a renderer has started.
START_S = 60.0


def prepare() -> None:
    """Starts a process that imports the renderers' modules in the background. Renderers are forked from it."""
    multiprocessing.set_forkserver_preload([__name__])
    forkserver.ensure_running()


class TemplateProcess:
    """Renders one model's chat template for one caller at a time; aborts a rendering after `seconds`."""

    def __init__(self, backbone: Backbone, seconds: float) -> None:
        self._model = SimpleNamespace(id=backbone.id, tokenizer=backbone.tokenizer)
        self._seconds = seconds
        prepare()
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_render_all, args=(other, self._model), daemon=True)
        self._process.start()
        other.close()
        self._ready = False

    def render(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> str:
        """Returns a prompt's text like `chat_prompt`; also raises UserError if this takes too much time or memory."""
        try:
            if not self._ready:
                if not self._connection.poll(START_S):
                    self._restart()
                    raise UserError(
                        f"the process for chat templates did not start within {START_S:.0f} s",
                        "try again when the machine is less busy",
                    )
                self._ready = self._connection.recv()
            self._connection.send((messages, template))
            if not self._connection.poll(self._seconds):
                raise TimeoutError
            text, fault = self._connection.recv()
        except (OSError, EOFError) as reason:
            self._restart()
            raise too_much(self._model) from reason
        if fault:
            raise UserError(*fault)
        return str(text)

    def _restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _render_all(connection: Connection, model: Any) -> None:
    """Renders prompts until the other end of the connection is closed."""
    process.owned = True
    # Ctrl-C must not end this process before the server has sent its last answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        connection.send(True)
        while True:
            messages, template = connection.recv()
            try:
                connection.send((chat_prompt(model, messages, template), None))
            except UserError as reason:
                connection.send((None, (reason.message, reason.remedy)))
    except (EOFError, OSError):
        pass
