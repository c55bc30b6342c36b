"""The program ``microqueue``: apart from the package, whose import takes half a second."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback, from its first moment on."""
    # A process that ignores it goes on ignoring it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from microqueue.cli import main as run  # noqa: PLC0415 (only now an interrupt is quiet)

    run()
