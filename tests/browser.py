"""Drives headless Chromium by its DevTools protocol, over two pipes."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Browser:
    """One page of a Chromium of its own, whose profile lies in `folder`."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        commands, self._commands = os.pipe()
        self._replies, replies = os.pipe()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
        ]
        words = [CHROMIUM, *flags, f"--user-data-dir={folder}", "about:blank"]
        command = ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{replies}', "-", *words]
        log = (folder.parent / "chromium.log").open("wb")
        self._process = subprocess.Popen(command, pass_fds=(commands, replies), stderr=log)
        for end in (commands, replies):
            os.close(end)
        log.close()
        self._unread, self._count, self._session = b"", 0, {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {
            "sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
        }
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Returns the result of a method of the protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._unread:
                self._unread += os.read(self._replies, 1 << 16) or self._fail("Chromium ended")
            text, self._unread = self._unread.split(b"\0", 1)
            reply = json.loads(text)
            if reply.get("id") == self._count:
                return reply["result"] if "result" in reply else self._fail(reply["error"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Returns the value of an expression in the page."""
        reply = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        return (
            reply["result"].get("value") if "exceptionDetails" not in reply else self._fail(reply)
        )

    def until(self, script: str, seconds: float = 60) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"!!({script})"):
            assert time.monotonic() < end, f"{script}: {self.run('document.body.innerText')}"
            time.sleep(0.02)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._replies)

    def _fail(self, reason: Any) -> Any:
        raise AssertionError(reason)
