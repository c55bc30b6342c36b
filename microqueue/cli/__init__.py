"""The command line: ``microqueue``. Needs the extra ``cli``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say in one sentence what it lacks."""
    try:
        import rich  # noqa: F401, PLC0415 (optional; looked for here, and used elsewhere)
        import typer  # noqa: F401, PLC0415 (as above)
    except ImportError:
        sys.exit("The command line needs typer and rich: run pip install 'microqueue[cli]'")
    from microqueue.cli.app import run  # noqa: PLC0415 (it imports both)

    run()
