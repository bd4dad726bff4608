"""Opens a page in headless Chromium, if it is installed."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

PROGRAM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
QUIET += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


def look(page: Path, script: str, folder: Path, *, width: int, dark: bool) -> tuple[dict, list[str]]:
    """Returns the value of a JavaScript expression in the page `width` pixels wide, and the lines of the console.

    The page stands in a frame: Chromium's own window is never narrower than 500 pixels.
    """
    script_tag = f"<script>parent.postMessage(JSON.stringify({script}), '*');</script></body>"
    inner, outer = folder / f"page-{width}-{dark}.html", folder / f"frame-{width}-{dark}.html"
    inner.write_text(page.read_text().replace("</body>", script_tag))
    listener = "addEventListener('message', (sent) => { document.getElementById('looked').textContent = sent.data; });"
    frame = f'<iframe src="{inner.name}" style="border:0;width:{width}px;height:900px"></iframe>'
    outer.write_text(f"<!doctype html><body><pre id='looked'></pre><script>{listener}</script>{frame}</body>")
    command = [PROGRAM, *QUIET, f"--user-data-dir={folder / f'user-{width}-{dark}'}", "--enable-logging=stderr"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--window-size=1500,1000", "--dump-dom"]
    command += ["--virtual-time-budget=5000"]  # the dump waits for the message
    done = subprocess.run([*command, outer.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    value = re.search(r'<pre id="looked">(.+?)</pre>', done.stdout, re.DOTALL)
    assert value is not None, done.stderr[-2000:]
    return json.loads(html.unescape(value[1])), re.findall(r"CONSOLE.*", done.stderr)
