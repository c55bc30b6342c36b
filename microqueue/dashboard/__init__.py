"""A live dashboard (extra ``dashboard``): see the queue, and deal with the dead letters.

app.mount("/queue", dashboard(queue))          # in an app of your own, or alone:
uvicorn.run(dashboard(queue))                  # microqueue dashboard does the same
"""

try:
    import fastapi
    import sse_starlette
except ImportError as exc:
    raise ImportError(
        "microqueue.dashboard needs fastapi and sse-starlette: pip install 'microqueue[dashboard]'"
    ) from exc

from microqueue.dashboard.app import dashboard
from microqueue.dashboard.options import DashboardOptions

del fastapi, sse_starlette

__all__ = ["DashboardOptions", "dashboard"]
