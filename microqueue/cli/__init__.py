"""The command line: ``microqueue``. Needs the extra ``cli``."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line; without its extra, exit with a message."""
    # During imports and after the command there is nothing to clean up, so Ctrl-C kills the
    # process without a traceback. If SIGINT is ignored, as under nohup, it stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import rich  # noqa: F401, PLC0415 (optional; checked here, used elsewhere)
        import typer  # noqa: F401, PLC0415 (as above)
    except ImportError:
        sys.exit("The command line needs typer and rich: run pip install 'microqueue[cli]'")
    from microqueue.cli.app import run  # noqa: PLC0415 (it imports both)

    run()
