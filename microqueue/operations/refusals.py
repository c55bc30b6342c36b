"""Refusals: the codes by which MongoDB says that a document is at fault, and nothing else.

Such a write fails again however often it is repeated, and says nothing of its neighbours.
"""

from __future__ import annotations

BAD_VALUE = 2
TYPE_MISMATCH = 14
DUPLICATE_KEY = 11000

BROKEN = frozenset({BAD_VALUE, TYPE_MISMATCH})
"""What should be a list or a number is none: an update cannot add to it, but replace it."""

AT_FAULT = BROKEN | {121, 171, 10334, 17280, 17419}
"""It may also break a rule of its collection, have keys of two lists, or be too large."""
