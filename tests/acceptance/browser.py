"""A real browser, and a dashboard to open in it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import uvicorn
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright

from tests.waiting import wait_for

CHROMIUM_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The first one needs half the processor time of the others: it draws no window."""
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DEADLINE_SEC = 30.0

expect.set_options(timeout=DEADLINE_SEC * 1000)


def find_chromium() -> str:
    """Find the browser that ``scripts/setup dev`` installs; without one, tests fail."""
    for name in CHROMIUM_NAMES:
        if path := shutil.which(name):
            return path
    raise AssertionError(
        "chromium is not installed: run scripts/setup dev, or apt install chromium"
    )


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Run a headless chromium of the system; nothing is downloaded."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), headless=True, args=list(FLAGS)
        )
        try:
            yield browser
        finally:
            browser.close()


class Served:
    """An app on a port of 127.0.0.1, in a thread, that can be stopped and started again."""

    def __init__(self, make_app: Callable[[], Any], *, path: str = "/", port: int = 0) -> None:
        self._make_app = make_app
        self.app: Any = None
        self._path = path
        self._port = port
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self._port}{self._path}"

    def start(self) -> None:
        """Serve, on the same port as before if there was one."""
        self.app = self._make_app()
        config = uvicorn.Config(
            self.app,
            host="127.0.0.1",
            port=self._port,
            log_level="warning",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, name="dashboard")
        self._thread.start()
        wait_for(
            lambda: self._server is not None and self._server.started,
            what="the start of the dashboard",
        )
        self._port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Stop, and break the connections that are still open after a second."""
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join(DEADLINE_SEC)
        assert not self._thread.is_alive(), "the dashboard did not stop"
        self._server = self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


class Watched:
    """Records errors of a page: logged, thrown, or violations of its policy."""

    def __init__(self, page: Page) -> None:
        self.problems: list[str] = []
        self.ignored: tuple[str, ...] = ()
        page.on("pageerror", lambda error: self.problems.append(f"threw {error}"))
        page.on(
            "console",
            lambda message: self.problems.append(message.text) if message.type == "error" else None,
        )

    def check(self) -> None:
        """Fail if the page had an error that the test did not expect."""
        unexpected = [
            problem
            for problem in self.problems
            if not any(expected in problem for expected in self.ignored)
        ]
        assert not unexpected, f"the page complained: {unexpected}"


class HeldBack:
    """Holds back requests of a page until the test releases them."""

    def __init__(self, page: Page, pattern: str) -> None:
        self._page = page
        self._routes: list[Route] = []
        self._holding = True
        page.route(pattern, self._answer)

    def _answer(self, route: Route) -> None:
        if self._holding:
            self._routes.append(route)
        else:
            route.continue_()

    def wait(self) -> None:
        """Wait until the page has sent a request."""

        def asked() -> list[Route]:
            self._page.wait_for_timeout(
                20
            )  # Playwright handles requests of the page only while it waits.
            return self._routes

        wait_for(asked, what="a request of the page")

    def release(self) -> None:
        """Release the requests that are held back, and all later ones."""
        self.wait()
        self._holding = False
        for route in self._routes:
            route.continue_()


def expect_connection(page: Page, state: str) -> None:
    """Wait until the page shows a state of its connection: live or lost."""
    expect(page.locator("[data-connection]")).to_have_attribute("data-connection", state)


def is_live(page: Page) -> None:
    """Wait until the page is connected to the event stream."""
    expect_connection(page, "live")


def expect_empty(page: Page, name: str) -> None:
    """Wait until the page shows an empty state."""
    expect(page.locator(f"[data-empty={name}]")).to_be_visible()


def action(place: Page | Locator, name: str) -> Locator:
    """Find the button of an action by its stable name."""
    return place.locator(f"[data-action={name}]")
