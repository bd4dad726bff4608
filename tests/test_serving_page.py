"""The page at / in a headless Chromium: a question is answered, accepted drafts in colour, with its speed."""

import shutil
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")

from medusa_cli.api import Medusa  # noqa: E402
from tests.runs import save_model, save_run  # noqa: E402
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
