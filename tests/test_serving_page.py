"""The page at / in a headless Chromium: a question is answered, accepted drafts in colour, with its speed."""

import shutil
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")

from medusa_cli.api import Medusa  # noqa: E402
from medusa_cli.serve.app import PAGE  # noqa: E402
from tests.helpers import save_model, save_run  # noqa: E402
from tests.serving import serving  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_chats(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", save_model(tmp_path / "model"))
    medusa = Medusa.from_pretrained(drafter=run.path, tree="static", dtype="fp32")
    with serving(medusa, api_key="secret") as server, playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda reason: faults.append(str(reason)))
        page.on("console", lambda said: faults.append(said.text) if "Content Security" in said.text else None)
        page.goto(server.url)

        page.fill("#text", "w1 w2")
        page.click("#send")
        page.wait_for_selector(".error")
        assert "API key" in page.text_content(".error")

        page.fill("#key", "secret")
        page.click("#clear")
        for question in ("w1 w2", "w3 <b>w4</b>"):
            before = page.locator(".assistant").count()
            page.fill("#text", question)
            page.press("#text", "Enter")
            page.locator(".assistant").nth(before).wait_for(state="attached")
            page.locator("#send", has_text="Send").wait_for()
        first = medusa.generate("w1 w2", max_new_tokens=256)
        assert page.locator(".assistant").first.text_content() == first.text
        assert page.locator(".assistant").first.locator(".drafted").count() == first.stats.accepted
        assert page.locator(".user").nth(1).text_content() == "w3 <b>w4</b>"
        assert "tokens/s" in page.text_content("#speed") and "tokens a step" in page.text_content("#speed")
        assert page.text_content("#model") == "tiny"
        assert not faults
        browser.close()


# A server that answers with "w1 " and then nothing more, or, told to be slow, not at all.
STUB = """
window.sent = []; window.slow = false;
window.fetch = (path, { body, signal }) => new Promise((done, fail) => {
  signal?.addEventListener("abort", () => fail(new DOMException("", "AbortError")));
  if (window.slow) return;
  if (path === "/v1/models") return done(new Response('{"data": [{"id": "m"}]}'));
  window.sent.push(JSON.parse(body).messages);
  done(new Response(new ReadableStream({ start(line) {
    line.enqueue(new TextEncoder().encode('data: {"medusa": {"pieces": [["w1 ", false]]}}\\n\\n'));
    signal.addEventListener("abort", () => line.error(new DOMException("", "AbortError")));
  } })));
});
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_an_answer_that_was_cleared_is_no_part_of_the_next_conversation(tmp_path: Path) -> None:
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(10_000)
        page.set_content(PAGE.read_text().replace('"use strict";', '"use strict";' + STUB))
        for question in ("first", "second"):
            page.fill("#text", question)
            page.click("#send")
            page.locator(".assistant", has_text="w1").wait_for()
            page.click("#clear")
        assert page.evaluate("window.sent") == [[{"role": "user", "content": one}] for one in ("first", "second")]
        page.evaluate("window.slow = true")
        page.fill("#text", "third")
        page.click("#send")
        page.locator("#send", has_text="Stop").click()  # before there is a word of the server
        page.locator("#send", has_text="Send").wait_for()
        assert page.locator(".error").count() == 0
        browser.close()
