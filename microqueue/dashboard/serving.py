"""Deprecated: the server is in :mod:`microqueue.dashboard.server`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microqueue.deprecation import moved_names

if TYPE_CHECKING:
    from microqueue.dashboard.server import DashboardServer

    __all__ = ["DashboardServer"]
else:
    __getattr__ = moved_names(
        __name__, {"DashboardServer": "microqueue.dashboard.server.DashboardServer"}
    )
