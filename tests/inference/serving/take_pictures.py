"""Takes the pictures of the chat page in docs/images.

draftsmith serve --target outputs/smollm2-135m --heads examples/heads/smollm2-135m-eagle3 \\
    examples/heads/smollm2-135m-mtp --dtype bfloat16 --pack_weights true
python -m tests.inference.serving.take_pictures http://127.0.0.1:8000
"""

from __future__ import annotations

import shutil
import sys
from typing import Any

from playwright.sync_api import sync_playwright

from tests.conftest import REPOSITORY

PROMPT = "What is a good way to learn a language?"
WARM_UPS = 1  # replies before the one in the picture


def take_picture(page: Any, name: str) -> None:
    if page.locator("#open-settings").is_visible():
        page.click("#open-settings")
    page.get_by_label("Tree").select_option("dynamic:3,2,8")  # so that there are deep drafts to show
    page.get_by_label("Max tokens").fill("64")
    page.get_by_label("Compare").set_checked(name == "page")
    for _ in range(WARM_UPS + 1):
        page.click("#new")
        page.get_by_label("Message").fill(PROMPT)
        page.get_by_label("Message").press("Enter")
        page.locator("#send").wait_for(state="visible", timeout=900_000)
    page.locator("[data-depth='3']").nth(1).hover()
    page.screenshot(path=REPOSITORY / "docs" / "images" / f"{name}.png")


def main(address: str) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for name, width, height, scheme in (("page", 1180, 720, "light"), ("page-phone", 390, 720, "dark")):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(address)
            page.locator("#heads option[value='none']:not(:first-child)").wait_for(state="attached")
            take_picture(page, name)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
