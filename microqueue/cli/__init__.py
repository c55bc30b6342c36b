"""The command line: ``microqueue``. Needs the extra ``cli``."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line, or say in one sentence what it lacks."""
    # While modules are imported, and when all is said, Ctrl-C has nothing to tidy up: it ends
    # the process, without a traceback. A process that ignores it goes on ignoring it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import rich  # noqa: F401, PLC0415 (optional; looked for here, and used elsewhere)
        import typer  # noqa: F401, PLC0415 (as above)
    except ImportError:
        sys.exit("The command line needs typer and rich: run pip install 'microqueue[cli]'")
    from microqueue.cli.app import run  # noqa: PLC0415 (it imports both)

    run()
