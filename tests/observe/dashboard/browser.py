"""A real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

HANG = 120_000.0  # milliseconds
PATHS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def browser() -> Iterator[Any]:
    """A browser; the test is skipped, with the reason, where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="the browser's driver is not installed")
    program = next(filter(None, map(shutil.which, PATHS)), None)
    if program is None:
        pytest.skip("tests of the page need a browser: apt-get install chromium")
    arguments = ["--disable-dev-shm-usage"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")
    with api.sync_playwright() as playwright:
        found = _launch(playwright, program, arguments, api.Error)
        try:
            yield found
        finally:
            found.close()


def _launch(playwright: Any, program: str, arguments: list[str], failure: type[Exception]) -> Any:
    """On a busy machine it may fail to start; then once more."""
    for last in (False, False, True):
        try:
            return playwright.chromium.launch(executable_path=program, args=arguments, timeout=HANG)
        except failure:
            if last:
                raise


class Tab:
    """A page that must not complain: neither its script nor its policy."""

    def __init__(self, browser: Any, link: str, **how: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **how)
        self.page = self.context.new_page()
        self.page.set_default_timeout(HANG)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console",
            lambda message: (
                self.complaints.append(message.text)
                if message.type in ("error", "warning") and "ERR_CONNECTION" not in message.text
                else None
            ),
        )
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(link)

    def wait_for(self, condition: str, argument: Any = None) -> None:
        """Until the JavaScript expression is true."""
        function = condition if "=>" in condition else f"() => {condition}"  # no eval: the policy
        self.page.wait_for_function(function, arg=argument)

    def shows(self, selector: str, text: str) -> None:
        """Wait until the element has the text."""
        self.wait_for(
            "([selector, text]) => [...document.querySelectorAll(selector)]"
            ".some(each => !each.closest('[hidden]') && each.textContent.includes(text))",
            [selector, text],
        )
