"""The ids of the runs of schedules: queues know them, also those that load no schedule."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

PROOF_KEPT = timedelta(hours=1)
"""How long a done task of a run is kept at least, whatever the retention."""
RUN_ID = r"^schedule:[A-Za-z0-9_.~%-]+:[A-Za-z0-9_.~%-]+:[0-9-]{10}T[0-9:.]{8,12}Z$"
"""What the id of a run's task looks like, for Python and MongoDB."""


def is_run_id(task_id: Any) -> bool:
    """Return whether a task has the id of a run of a schedule.

    Such a task proves that its run was added. So it is kept for a while when it is done.
    """
    return isinstance(task_id, str) and re.search(RUN_ID, task_id) is not None
