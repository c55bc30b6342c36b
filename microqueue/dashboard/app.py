"""Put a dashboard together: an app that runs alone, or inside of another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles

import microqueue
from microqueue.arguments import refused
from microqueue.async_queue import AsyncQueue
from microqueue.dashboard import acting, letters, problems, reading
from microqueue.dashboard.access import AnyQueue
from microqueue.dashboard.context import Context
from microqueue.dashboard.options import DashboardOptions
from microqueue.dashboard.service import STATIC, pages, service
from microqueue.dashboard.shield import Shield
from microqueue.queue import Queue

API = "/api/v1"


def dashboard(queue: AnyQueue, **options: Any) -> FastAPI:
    """Make the dashboard of a queue's collection; ``options`` are those of `DashboardOptions`.

    It shows all queues of the collection, and the given one first. Mount it in an app of your
    own, or serve it alone: then give a token, unless nobody else can reach it.
    """
    if not isinstance(queue, Queue | AsyncQueue):
        raise refused("queue", queue, "give a Queue or an AsyncQueue")
    context = Context(queue, DashboardOptions(**options))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        context.events.stop()

    app = FastAPI(
        title="microqueue",
        version=microqueue.__version__,
        docs_url=None,  # They would load scripts from elsewhere.
        redoc_url=None,
        openapi_url=f"{API}/openapi.json",
        lifespan=lifespan,
    )
    app.state.context = context
    problems.install(app)
    told: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": problems.Problem},
        "5XX": {"model": problems.Problem},
    }
    if not context.options.read_only:
        app.include_router(letters.router, prefix=API, tags=["dead letters"], responses=told)
        app.include_router(acting.router, prefix=API, tags=["acting"], responses=told)
    app.include_router(reading.router, prefix=API, tags=["reading"], responses=told)
    app.include_router(service, tags=["service"])
    app.include_router(pages)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_middleware(Shield, context=context)
    return app
