"""A headless Chromium, driven from a test's thread while the gateway runs on its event loop."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)

T = TypeVar("T")


@contextmanager
def chromium() -> Iterator[Chrome]:
    """A browser with a profile of its own; skips where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (omni-proxy[browser])")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("there is no Chromium with its driver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            yield found
        finally:
            found.quit()


class Page:
    """The page in a browser. Every call is made in a thread: the gateway needs the loop."""

    def __init__(self, driver: Chrome) -> None:
        self._driver = driver

    async def do(self, what: Callable[[Chrome], T]) -> T:
        """Anything that selenium can do."""
        return await asyncio.to_thread(what, self._driver)

    async def open(self, url: str, width: int = 1280, dark: bool = False) -> None:
        """Load the page in a window of this width."""

        def load(driver: Any) -> None:
            metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
            driver.get(url)

        await self.do(load)

    async def leave(self) -> None:
        """Go away from the page, and forget what it complained of."""
        await self.do(lambda driver: driver.get("about:blank"))
        await self.complaints()

    async def js(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return await self.do(lambda driver: driver.execute_script(script, *arguments))

    async def until(self, condition: str, timeout_s: float = 20.0) -> None:
        """Wait until an expression is true."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.js(f"return Boolean({condition})"):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.js("return document.body.innerText")
            raise AssertionError(f"never true: {condition}\n{text[:2000]}") from None

    async def text(self, selector: str) -> str:
        """The text of the first element that fits."""
        found: str = await self.js("return document.querySelector(arguments[0]).textContent", selector)
        return found

    async def log_in(self, token: str) -> None:
        """Type the token into the form that asks for it."""
        await self.until("document.querySelector('#login').open")

        def type_it(driver: Any) -> None:
            field = driver.find_element("id", "token")
            field.send_keys(token)
            field.submit()

        await self.do(type_it)

    async def keys(self, *keys: str) -> None:
        """Press keys where the focus is."""

        def press(driver: Any) -> None:
            from selenium.webdriver import ActionChains

            ActionChains(driver).send_keys(*keys).perform()

        await self.do(press)

    async def shoot(self, folder: str, name: str) -> None:
        """A picture of the whole page, kept for people to look at."""
        from base64 import b64decode

        def shot(driver: Any) -> bytes:
            size = driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            found = driver.execute_cdp_cmd(
                "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
            )
            return b64decode(found["data"])

        picture = await self.do(shot)
        with open(os.path.join(folder, f"{name}.png"), "wb") as file:  # noqa: ASYNC230 - a test's own file
            file.write(picture)

    async def complaints(self) -> list[str]:
        """What the browser complained of since the last time: faults in scripts, refused contents.

        That the page is told to ask for a token is none.
        """
        entries = await self.do(lambda driver: driver.get_log("browser"))
        found = [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]
        return [message for message in found if "status of 401" not in message]
