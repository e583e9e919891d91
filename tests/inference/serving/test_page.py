"""The chat page in a headless Chromium: replies, comparison, faults, keyboard, phone, colours."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedModel

from draftsmith.inference import Target
from draftsmith.inference.serving.reply_maker import name_drafters
from draftsmith.inference.serving.scheduler import Limits, Scheduler
from draftsmith.scripts.shared.model_loading import load_heads
from tests.conftest import REPOSITORY
from tests.inference.serving.arrivals import SECONDS
from tests.inference.serving.conftest import serve_in_thread
from tests.inference.serving.page_server import TEXT, PageServer, split_words

playwright = pytest.importorskip(
    "playwright.sync_api", reason="pip install playwright, and a Chromium, to test the page"
)
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("there is no Chromium: apt-get install chromium", allow_module_level=True)

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-extensions"]
PHONE = {"width": 390, "height": 844}
HOSTILE = '<img src=x onerror="document.title=1"> &amp; <script>document.title=1</script> "quoted"'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[PageServer]:
    server = PageServer()
    yield server
    server.stop()


@pytest.fixture
def page(browser: Any, server: PageServer) -> Iterator[Any]:
    yield from open_page(browser, server.address)


def open_page(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """The loaded page. Nothing may fail in it, and it may speak to no other host."""
    context = browser.new_context(**options)
    context.set_default_timeout(10_000)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: request.url.startswith(address) or errors.append(request.url))
    page.goto(address)
    page.wait_for_function("document.getElementById('model').textContent != 'connecting…'")
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


def texts(page: Any) -> list[str]:
    found: list[str] = page.locator(".reply").all_text_contents()
    return found


def depths(page: Any) -> list[int]:
    return [
        int(depth) for depth in page.eval_on_selector_all("[data-depth]", "all => all.map(one => one.dataset.depth)")
    ]


def figures(page: Any, number: int = 0) -> dict[str, str]:
    pairs = page.locator(".figures").nth(number).locator("> div:not([role])").all()
    return {pair.locator("dt").inner_text(): pair.locator("dd").inner_text() for pair in pairs}


def test_a_reply_shows_what_was_drafted(page: Any, server: PageServer) -> None:
    assert page.title().startswith("chat-13m")
    page.get_by_label("Tree").select_option("chain:4")
    page.get_by_label("Max tokens").fill("30")
    page.get_by_label("Seed").fill("7")
    send(page, "Why?")
    assert texts(page) == ["".join(split_words(TEXT)[:30])]
    told = [token["depth"] for step in server.steps({"heads": "eagle3", "max_tokens": 30}) for token in step]
    assert depths(page) == told
    assert len(set(told)) > 3
    body = server.requests[0]
    wanted = {"heads": "eagle3", "tree": "chain:4", "max_tokens": 30, "seed": 7, "temperature": 0, "draft_report": True}
    assert wanted.items() <= body.items()
    assert body["messages"] == [{"role": "user", "content": "Why?"}]
    colours = page.eval_on_selector_all(
        "[data-depth] > span", "all => all.map(one => getComputedStyle(one).backgroundColor)"
    )
    own, drafted = (
        {c for c, depth in zip(colours, told, strict=True) if (depth > 0) == is_drafted} for is_drafted in (0, 1)
    )
    assert own == {"rgba(0, 0, 0, 0)"}
    assert len(drafted) == len(set(told)) - 1
    shown = figures(page)
    assert shown["tokens"] == "30"
    assert page.locator(".pane header").get_by_text("cut at max tokens").count() == 1
    assert float(shown["tokens/s"].replace(",", "")) > 0
    assert float(shown["acceptance length"]) > 2
    assert "depth" in page.locator(".histogram small").inner_text()
    bars = page.locator(".histogram span").all_inner_texts()
    assert bars == [str(depth) for depth in range(1, max(told) + 1)]
    # The next turn has the conversation.
    page.get_by_label("Heads").select_option("none")
    send(page, "And?")
    assert [message["role"] for message in server.requests[1]["messages"]] == ["user", "assistant", "user"]
    assert server.requests[1]["messages"][1]["content"] == texts(page)[0]
    assert (server.requests[1]["heads"], "tree" in server.requests[1]) == ("none", False)
    assert set(depths(page)[30:]) == {0}
    assert set(figures(page, 1)) == {"tokens", "tokens/s"}


def test_texts_are_never_html(page: Any, server: PageServer) -> None:
    server.text = HOSTILE
    send(page, HOSTILE)
    assert texts(page) == [HOSTILE]
    assert page.locator(".asked").inner_text() == HOSTILE
    assert page.title().startswith("chat-13m")
    assert page.locator("#turns img, #turns script").count() == 0


@pytest.mark.parametrize("how", ["button", "Escape", "New chat"])
def test_a_reply_can_be_stopped(page: Any, server: PageServer, how: str) -> None:
    server.seconds = 0.5
    send(page, "Why?", waits=False)
    page.locator("[data-depth]").nth(2).wait_for()
    if how == "Escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop" if how == "button" else how).click()
    wait(page)
    if how == "New chat":
        assert texts(page) == []
        assert page.locator("#welcome").is_visible()
    else:
        assert TEXT.startswith(texts(page)[0])
        assert 2 < len(depths(page)) < len(split_words(TEXT))
        assert page.locator(".pane header").get_by_text("stopped").count() == 1
    server.seconds = 0.0
    send(page, "Again")
    assert texts(page)[-1] == TEXT


def test_keys(page: Any, server: PageServer) -> None:
    box = page.get_by_label("Message")
    send(page, "  ", waits=False)
    assert server.requests == []
    box.fill("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert box.input_value() == "one\ntwo"
    page.keyboard.press("Enter")
    wait(page)
    assert server.requests[0]["messages"][0]["content"] == "one\ntwo"
    assert box.input_value() == ""
    # From token to token: the tip follows, and is told to screen readers.
    page.locator(".reply").focus()
    tips = []
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        tips.append(page.locator("#tip").inner_text())
    first = [token for step in server.steps({"heads": "eagle3", "max_tokens": 4}) for token in step]
    assert [("model's own" in tip) for tip in tips] == [token["depth"] == 0 for token in first]
    assert tips[-1] in page.get_by_role("status").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_the_tip_of_a_token(page: Any, server: PageServer) -> None:
    send(page, "Why?")
    tokens = [token for step in server.steps({"heads": "eagle3", "max_tokens": 99}) for token in step]
    place = next(place for place, token in enumerate(tokens) if token["depth"] == 2)
    page.locator("[data-depth]").nth(place).hover()
    assert page.locator("#tip").inner_text() == f"drafted at depth 2, probability {tokens[place]['probability']:.0%}"
    page.locator("[data-depth='0']").first.hover()
    assert page.locator("#tip").inner_text() == "the model's own token"


def test_comparing_equal_texts(page: Any, server: PageServer) -> None:
    page.get_by_label("Compare").check()
    page.get_by_label("Temperature").fill("0.8")
    send(page, "Why?")
    assert texts(page) == [TEXT, TEXT]
    drafted, plain = server.requests
    assert (drafted["heads"], plain["heads"]) == ("eagle3", "none")
    for name in ("seed", "temperature", "max_tokens", "messages"):
        assert drafted[name] == plain[name]
    assert drafted["temperature"] == 0.8
    verdict = page.locator(".verdict").inner_text()
    assert verdict.startswith(f"Identical. Both texts have the same {len(split_words(TEXT))} tokens")
    assert page.locator(".differs").count() == 0
    left, right = (pane.bounding_box() for pane in page.locator(".pane").all())
    assert left["y"] == right["y"], "side by side"


@pytest.mark.parametrize("is_near_tie", [True, False])
def test_comparing_texts_that_differ(page: Any, server: PageServer, is_near_tie: bool) -> None:
    """A near-tie is told in neutral colour."""
    server.plain_text, server.is_near_tie = TEXT.replace("sleep", "feel"), is_near_tie
    page.get_by_label("Compare").check()
    page.get_by_label("Seed").fill("7")
    send(page, "Why?")
    place = split_words(TEXT).index(" sleep")
    assert page.locator(".differs").all_inner_texts() == [" sleep", " feel"]
    verdict = page.locator(".verdict").inner_text()
    assert f'Token {place + 1} is the first that differs: " sleep" with drafts, " feel" plainly.' in verdict
    assert "-0.6931 and -0.6932" in verdict
    asked = server.requests[-1]
    assert (asked["seed"], asked["temperature"]) == (7, 0)
    assert [text[place] for text in asked["texts"]] == [hash(word) % 10**6 for word in (" sleep", " feel")]
    colours = page.eval_on_selector_all(
        ".verdict, .verdict b, .differs > span",
        "all => all.map((one) => [getComputedStyle(one).color, getComputedStyle(one).outlineColor])",
    )
    bad = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--bad')")
    red = f"rgb({', '.join(str(int(bad.strip()[at : at + 2], 16)) for at in (1, 3, 5))})"
    assert any(red in pair for pair in colours) != is_near_tie


def test_markdown(page: Any, server: PageServer) -> None:
    """Marks are hidden, all else stays text; every token is shown once, and has its depth."""
    server.text = (
        "# Good *sleep*\n\nIt is **very important** for `a_b_c` and 2 * 3 * 4:\n\n1. a dark room\n2. <b>no</b> noise\n"
        "   - a nested _one_\n\n> quoted\n\n```python\nfor x in y:\n\n    z(**x)\n```\nThe end\nof it"
    )
    send(page, "Why?")
    blocks = page.locator(".reply > *").all()
    shown = [(block.evaluate("one => one.tagName"), block.evaluate("one => one.textContent")) for block in blocks]
    assert shown == [
        ("H4", "Good sleep"),
        ("P", "It is very important for a_b_c and 2 * 3 * 4:"),
        ("DIV", "1. a dark room"),
        ("DIV", "2. <b>no</b> noise"),
        ("DIV", "a nested one"),
        ("BLOCKQUOTE", "quoted"),
        ("PRE", "for x in y:\n\n    z(**x)"),
        ("P", "The end\nof it"),
    ]
    looks = {name: "".join(page.locator(f".reply .{name}").all_text_contents()) for name in ("strong", "em", "code")}
    assert looks == {"strong": "veryimportant", "em": "sleepone", "code": "a_b_c"}
    assert depths(page) == [
        token["depth"] for step in server.steps({"heads": "eagle3", "max_tokens": 99}) for token in step
    ]


def test_steps_without_drafts_are_told(page: Any, server: PageServer) -> None:
    server.drafted_steps = 1
    send(page, "Why?")
    assert "Drafted in 1 of " in page.locator(".note").last.inner_text()
    server.drafted_steps = 0
    send(page, "Why?")
    assert "Nothing was drafted" in page.locator(".note").last.inner_text()
    page.get_by_label("Tree").select_option("chain:4")
    send(page, "Why?")
    assert page.locator(".note").last.is_hidden()


def test_texts_of_which_one_ends_first(page: Any, server: PageServer) -> None:
    server.plain_text = TEXT + " Yes."
    page.get_by_label("Compare").check()
    send(page, "Why?")
    assert 'the end with drafts, " Yes." plainly' in page.locator(".verdict").inner_text()
    assert page.locator(".differs").all_inner_texts() == [" Yes."]


def test_a_connection_that_breaks_off(page: Any, server: PageServer) -> None:
    server.breaks_after = 4
    page.get_by_label("Compare").check()
    send(page, "Why?")
    alert = page.get_by_role("alert")
    assert "broke off" in alert.inner_text()
    assert 0 < len(texts(page)[0]) < len(TEXT)
    assert len(server.requests) == 1, "nothing is compared with it"
    server.breaks_after = None
    alert.get_by_role("button", name="Try again").click()
    wait(page)
    assert texts(page) == [TEXT, TEXT]
    assert page.locator(".problem:visible").count() == 0


def test_a_server_that_is_gone(page: Any, server: PageServer) -> None:
    send(page, "Why?")
    server.stop()
    send(page, "And?")
    assert "cannot be reached. Is draftsmith serve still running?" in page.get_by_role("alert").inner_text()
    assert texts(page) == [TEXT, ""]
    assert page.get_by_label("Message").is_enabled()


def test_what_the_server_refuses(page: Any, server: PageServer) -> None:
    page.get_by_label("Tree").select_option("gamma")
    send(page, "Why?")
    assert "these heads draft no chains" in page.get_by_role("alert").inner_text()
    page.get_by_label("Tree").select_option("")
    page.get_by_label("Max tokens").fill("0")
    send(page, "Why?", waits=False)
    assert len(server.requests) == 1, "the page refuses numbers that are out of range itself"


def test_the_key_stays_in_memory(browser: Any, server: PageServer) -> None:
    server.api_key = "secret"
    for page in open_page(browser, server.address):
        assert "asks for an API key" in page.get_by_role("alert").inner_text()
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Tab")
        page.get_by_text("chat-13m").wait_for()
        assert page.locator("#connection").count() == 0
        send(page, "Why?")
        assert texts(page) == [TEXT]
        kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert "Why?" in kept
        assert "secret" not in kept
        page.reload()
        assert page.get_by_label("API key").input_value() == ""


def test_a_reload_keeps_the_conversation_and_the_settings(page: Any, server: PageServer) -> None:
    page.get_by_label("Heads").select_option("mtp")
    page.get_by_label("Compare").check()
    page.get_by_label("Temperature").fill("0.5")
    send(page, "Why?")
    before = texts(page), depths(page), page.locator(".verdict").inner_text(), figures(page)
    page.reload()
    page.get_by_text("chat-13m").wait_for()
    assert (texts(page), depths(page), page.locator(".verdict").inner_text(), figures(page)) == before
    assert page.get_by_label("Heads").input_value() == "mtp"
    assert page.get_by_label("Compare").is_checked()
    assert page.get_by_label("Temperature").input_value() == "0.5"
    send(page, "And?")
    assert len(server.requests[-1]["messages"]) == 3


def test_copying(browser: Any, server: PageServer) -> None:
    for page in open_page(browser, server.address, permissions=["clipboard-read", "clipboard-write"]):
        send(page, "Why?")
        page.get_by_role("button", name="Copy").click()
        page.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == TEXT


def test_a_phone(browser: Any, server: PageServer) -> None:
    for page in open_page(browser, server.address, viewport=PHONE):
        assert page.get_by_label("Heads").is_hidden()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Compare").check()
        page.get_by_role("button", name="Settings").click()
        send(page, "Why? " + "m" * 200)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert page.locator("#log").evaluate("log => log.scrollWidth <= log.clientWidth")
        above, below = (pane.bounding_box() for pane in page.locator(".pane").all())
        assert above["y"] + above["height"] <= below["y"], "one above the other"


def contrast(first: str, second: str) -> float:
    """WCAG 2's contrast of two colours, "rgb(r, g, b)"."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours(browser: Any, server: PageServer, scheme: str) -> None:
    for page in open_page(browser, server.address, color_scheme=scheme):
        send(page, "Why?")
        pairs = page.evaluate(
            """(places) => [...document.querySelectorAll(places)].map((one) => {
              let ground = one;
              while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
              return [getComputedStyle(one).color, getComputedStyle(ground).backgroundColor];
            })""",
            "#model, .legend li, #send, .reply > span > span, .asked, .figures dt, #composer p, label, small",
        )
        assert len(pairs) > 20
        legend = page.eval_on_selector_all(
            ".legend li:not(:first-child)", "all => all.map(one => getComputedStyle(one).backgroundColor)"
        )
        for one, other in itertools.combinations(legend, 2):
            parts = ([int(part) for part in re.findall(r"\d+", colour)] for colour in (one, other))
            assert sum(abs(a - b) for a, b in zip(*parts, strict=True)) > 40, "depths look different"
        assert min(contrast(*pair) for pair in pairs) >= 4.5
        ground = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(ground)
        assert (contrast(before, "rgb(0, 0, 0)") < 4.5) == (scheme == "dark")
        page.get_by_role("button", name="Switch to").click()
        switched = page.evaluate(ground)
        assert switched != before
        page.reload()
        assert page.evaluate(ground) == switched


def test_every_control_has_a_name(page: Any) -> None:
    names = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea")].map(
        (one) => one.getAttribute("aria-label") || one.labels?.[0]?.textContent || one.textContent)"""
    )
    assert len(names) > 10
    assert all(name.strip() for name in names)


def test_the_server_itself(browser: Any, chat_target: PreTrainedModel, chat_tokenizer: Any) -> None:
    """The embedded target with EAGLE-3 heads: streams, comparison, stopping, the server's end."""
    target = Target(chat_target)
    heads = load_heads(str(REPOSITORY / "examples" / "heads" / "eagle3"), target)
    limits = Limits(max_rows=2, max_length=1024, max_waiting=4, max_lanes=2)
    scheduler = Scheduler(target, name_drafters({"eagle3": heads}), tree="dynamic:4,4,12", limits=limits)
    with serve_in_thread(scheduler, chat_tokenizer) as served:
        for page in open_page(browser, served.address):
            page.get_by_label("Compare").check()
            page.get_by_label("Max tokens").fill("40")
            for temperature in ("0", "0.8"):
                page.get_by_label("Temperature").fill(temperature)
                send(page, "What are the benefits of exercise?")
                assert page.locator(".verdict").last.inner_text().startswith("Identical.")
            assert max(depths(page)) > 1
            drafted, plain, *_ = texts(page)
            assert drafted == plain
            assert drafted.startswith("Regular exercise is a great way to improve your mood")  # as in the README
            assert 1 < float(figures(page)["acceptance length"]) <= 5
            page.get_by_label("Max tokens").fill("400")
            page.get_by_label("Temperature").fill("1")
            send(page, "Tell me a story.", waits=False)
            page.locator(".pane.running [data-depth]").first.wait_for()
            page.keyboard.press("Escape")
            wait(page)
            served.wait_until_idle()
            served.end()
            send(page, "And?")
            assert "cannot be reached" in page.get_by_role("alert").inner_text()
