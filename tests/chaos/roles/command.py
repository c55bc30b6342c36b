"""Run a module as a command, with a last line in the ledger.

``python -m tests.chaos.roles.command microqueue ...`` is ``python -m microqueue ...``.
"""

from __future__ import annotations

import os
import runpy
import sys

from tests.chaos.leaving import leave_at_exit
from tests.chaos.ledger import Ledger

if __name__ == "__main__":
    leave_at_exit(Ledger(os.path.dirname(os.environ["CHAOS_RUN"]), os.environ["CHAOS_WHO"]))  # noqa: PTH120
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
