"""A live dashboard of all queues of a collection, with a REST API (extra ``dashboard``).

app.mount("/queue", dashboard(queue))          # inside your app, or on its own:
uvicorn.run(dashboard(queue))                  # the command `microqueue dashboard` does the same
"""

try:
    import fastapi
    import sse_starlette
except ImportError as exc:
    raise ImportError(
        "microqueue.dashboard needs fastapi and sse-starlette: pip install 'microqueue[dashboard]'"
    ) from exc

from microqueue.dashboard.app import dashboard
from microqueue.dashboard.options import DashboardOptions, DashboardOptionsDict

del fastapi, sse_starlette

__all__ = ["DashboardOptions", "DashboardOptionsDict", "dashboard"]
