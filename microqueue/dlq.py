"""Deprecated: the models are in :mod:`microqueue.dead_letter_models`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microqueue.deprecation import moved_names

if TYPE_CHECKING:
    from microqueue.dead_letter_models import (
        DeadLetterFilter,
        DeadLetterGroup,
        DeadLetterGroups,
        DeadLetterPage,
        DeadLetterStats,
        ReplayReport,
    )

    __all__ = [
        "DeadLetterFilter",
        "DeadLetterGroup",
        "DeadLetterGroups",
        "DeadLetterPage",
        "DeadLetterStats",
        "ReplayReport",
    ]
else:
    __getattr__ = moved_names(
        __name__,
        {
            "DeadLetterFilter": "microqueue.DeadLetterFilter",
            "DeadLetterGroup": "microqueue.dead_letter_models.DeadLetterGroup",
            "DeadLetterGroups": "microqueue.dead_letter_models.DeadLetterGroups",
            "DeadLetterPage": "microqueue.DeadLetterPage",
            "DeadLetterStats": "microqueue.DeadLetterStats",
            "LetterGroup": "microqueue.dead_letter_models.DeadLetterGroup",
            "LetterGroups": "microqueue.dead_letter_models.DeadLetterGroups",
            "ReplayReport": "microqueue.ReplayReport",
        },
    )
