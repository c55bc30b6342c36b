"""pymongoarrow, imported quietly: it warns of a pyarrow that is newer than its own build."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    from pymongoarrow.context import PyMongoArrowContext
    from pymongoarrow.schema import Schema
    from pymongoarrow.types import ObjectIdType

__all__ = ["ObjectIdType", "PyMongoArrowContext", "Schema"]
