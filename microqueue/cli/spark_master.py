"""Where Spark runs, checked before it starts: it would answer with a page of Java."""

from __future__ import annotations

import re

from microqueue.arguments import refused

FORMS = tuple(
    re.compile(form)
    for form in (
        r"local",
        r"local\[(\*|[1-9]\d*)(\s*,\s*[1-9]\d*)?\]",
        r"local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]",
        r"spark://[^\s,/:]+:\d+(,[^\s,/:]+:\d+)*",
        r"spark://\[[0-9a-fA-F:.]+\]:\d+",
        r"yarn",
        r"k8s://\S+",
    )
)
INSTEAD = (
    "give local[4] for four cores here, local[*] for all of them, "
    "or a cluster: spark://host:7077, yarn, k8s://https://host:443"
)


def check_master(master: str | None) -> None:
    """Refuse an address of a form that Spark does not know; none is for Spark to choose."""
    if master is not None and not any(form.fullmatch(master) for form in FORMS):
        raise refused("master", master, INSTEAD)
