"""``python -m microqueue.cli`` is ``microqueue``."""

from microqueue.cli import main

main()
