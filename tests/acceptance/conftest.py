from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from microqueue import Queue
from microqueue.cli.logs import LIBRARIES
from microqueue.dashboard import dashboard
from tests.acceptance.browser import Served, Watched, is_live, open_browser
from tests.acceptance.command_line import Cli
from tests.ports import free_port

# The page reloads its data now and then. Here it must not: what it shows has to come by events.
WITHOUT_POLLING = """
    const startInterval = window.setInterval;
    window.setInterval = (run, period) => period >= 5000 ? 0 : startInterval(run, period);
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser; of one module, for playwright's event loop would be in the way of others."""
    with open_browser() as started:
        yield started


@pytest.fixture
def serve(microqueue_database: Any) -> Iterator[Callable[..., Served]]:
    """Serve dashboards of a queue, with any of their options, until the test ends.

    The database is dropped after that, not while a page still looks at it.
    """
    with ExitStack() as stack:

        def start(queue: Queue[Any], *, port: int = 0, **options: Any) -> Served:
            return stack.enter_context(Served(lambda: dashboard(queue, **options), port=port))

        yield start


def forget_routes(page: Page) -> None:
    """Forget answers that are still being made for a page when its test is over."""
    if not page.is_closed():
        page.unroute_all(behavior="ignoreErrors")


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open pages, each with its own cookies and storage; none may log an error."""
    watched: list[Watched] = []
    with ExitStack() as stack:

        def open_page(*, ignoring: tuple[str, ...] = (), **options: Any) -> Page:
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
            stack.callback(context.close)
            page = context.new_page()
            stack.callback(forget_routes, page)
            page.add_init_script(WITHOUT_POLLING)
            watcher = Watched(page)
            watcher.ignored = ignoring
            watched.append(watcher)
            return page

        yield open_page
    for watcher in watched:
        watcher.check()


@pytest.fixture
def visit(serve: Callable[..., Served], new_page: Callable[..., Page]) -> Callable[..., Page]:
    """Open a view of a queue's dashboard, and wait until it is live."""

    def open_view(
        queue: Queue[Any], view: str = "overview", *, ignoring: tuple[str, ...] = (), **options: Any
    ) -> Page:
        served = serve(queue, **options)
        page = new_page(ignoring=ignoring)
        page.goto(f"{served.url}#/{view}")
        is_live(page)
        return page

    return open_view


@pytest.fixture
def cli(database_uri: str, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("MICROQUEUE_URI", database_uri)
    return Cli()


@pytest.fixture
def queue(microqueue_database: Any) -> Queue[Any]:
    return Queue(microqueue_database)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address, with a password, of a server that is not there."""
    monkeypatch.setenv("MICROQUEUE_SERVER_TIMEOUT", "0.3")
    return f"mongodb://anna:sesame@127.0.0.1:{free_port()}/shop"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands of this test, and of what it starts, have their embedded server."""
    directory = tmp_path / "home"
    monkeypatch.setenv("MICROQUEUE_HOME", str(directory))
    return directory


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    """Put the loggers back as they were: a command that is run in this process sets them up."""
    loggers = [logging.getLogger(name) for name in ("", "microqueue", *LIBRARIES)]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    yield
    for logger, handlers, level in before:
        logger.handlers = handlers
        logger.setLevel(level)
