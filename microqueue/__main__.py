"""The command line, as ``python -m microqueue``."""

from microqueue.cli import main

main()
