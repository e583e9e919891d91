"""The chat page in a headless Chromium: the embedded target with EAGLE-3 heads streams, compares and stops."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedModel

from draftsmith.inference import Target
from draftsmith.inference.serving.scheduler import Limits, Scheduler
from draftsmith.scripts.shared.model_loading import load_heads
from tests.conftest import REPOSITORY
from tests.inference.serving.arrivals import SECONDS
from tests.inference.serving.conftest import serve_in_thread

playwright = pytest.importorskip(
    "playwright.sync_api", reason="pip install playwright, and a Chromium, to test the page"
)
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("there is no Chromium: apt-get install chromium", allow_module_level=True)
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-extensions"]
HOSTILE = '<img src=x onerror="document.title=1"> &amp; <script>document.title=1</script> "quoted"'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


def open_page(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """The loaded page. Nothing may fail in it, and it may speak to no other host."""
    context = browser.new_context(**options)
    context.set_default_timeout(10_000)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: request.url.startswith(address) or errors.append(request.url))
    page.goto(address)
    page.locator("#model").filter(has_not_text="connecting…").wait_for()  # the page's policy forbids polling by eval
    yield page
    context.close()
    assert errors == []


def send(page: Any, text: str, *, waits: bool = True) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    if waits:
        wait(page)


def wait(page: Any) -> None:
    page.locator("#send").wait_for(state="visible", timeout=1000 * SECONDS)


def figures(page: Any) -> dict[str, str]:
    pairs = page.locator(".figures").first.locator("> div:not([role])").all()
    return {pair.locator("dt").inner_text(): pair.locator("dd").inner_text() for pair in pairs}


def test_replies(browser: Any, chat_target: PreTrainedModel, chat_tokenizer: Any) -> None:
    target = Target(chat_target)
    heads = load_heads(str(REPOSITORY / "examples" / "heads" / "eagle3"), target)
    limits = Limits(max_rows=2, max_length=1024, max_waiting=4, max_lanes=2)
    scheduler = Scheduler(target, {"eagle3": heads}, tree="dynamic:4,4,12", limits=limits)
    with serve_in_thread(scheduler, chat_tokenizer) as served:
        for page in open_page(browser, served.address):
            page.get_by_label("Compare").check()
            page.get_by_label("Max tokens").fill("40")
            for temperature in ("0", "0.8"):
                page.get_by_label("Temperature").fill(temperature)
                send(page, "What are the benefits of exercise?")
                assert page.locator(".verdict").last.inner_text().startswith("Identical.")
            assert page.eval_on_selector_all("[data-depth]", "all => all.some(one => one.dataset.depth > 1)")
            drafted, plain, *_ = page.locator(".reply").all_text_contents()
            assert drafted == plain
            assert drafted.startswith("Regular exercise is a great way to improve your mood")  # as in the README
            assert 1 < float(figures(page)["acceptance length"]) <= 5
            page.get_by_label("Max tokens").fill("400")
            page.get_by_label("Temperature").fill("1")
            send(page, f"Tell me a story. {HOSTILE}", waits=False)
            page.locator(".pane.running [data-depth]").first.wait_for()
            page.keyboard.press("Escape")
            wait(page)
            assert page.locator(".asked").last.inner_text().endswith(HOSTILE)
            assert page.locator("#turns img, #turns script").count() == 0
            served.wait_until_idle()
            served.end()
            send(page, "And?")
            assert "cannot be reached" in page.get_by_role("alert").inner_text()
