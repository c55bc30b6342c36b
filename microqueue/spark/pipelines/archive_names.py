"""How the name of a queue stands in the paths of an archive: escaped, and shortened if need be.

File systems take 255 bytes for the name of a directory, and one letter of a queue's name may take
four. A name that is too long is written as its beginning and a hash of all of it; the log says
which name is meant, and so does the document of each task.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from pyspark.sql import Column
from pyspark.sql import functions as f

from microqueue.spark.pipelines.archive_log import QUEUE

LONGEST_BYTES = 255 - len(QUEUE)
EMPTY = "__HIVE_DEFAULT_PARTITION__"
"""How Spark writes an empty name in a path."""

ESCAPED = frozenset("\"#%'*/:=?\\{[]^\x7f") | {chr(code) for code in range(1, 32)}
"""What Spark escapes in the names of directories, and nothing else; each takes three bytes."""

# Code by code, which Python and Java read alike.
NOT_ESCAPED = "[^{}]".format("".join(f"\\x{ord(letter):02x}" for letter in sorted(ESCAPED)))
NOT_PLAIN = "[^A-Za-z0-9._-]"
BEGINNING = 40
HASH_DIGITS = 32
SHORT = f"~[0-9a-f]{{{HASH_DIGITS}}}$"
UNFIT = f"{SHORT}|\\x00|^{EMPTY}$"
"""What is shortened, however long: names that look shortened, and those that no path can hold."""


def escaped(queue: str) -> str:
    """Write the name of a queue as Spark writes it in a path, and reads it."""
    text = "".join(f"%{ord(letter):02X}" if letter in ESCAPED else letter for letter in queue)
    return text or EMPTY


def shortened(queue: str) -> str:
    """Give a name that fits into a path, escaped: the queue's own wherever that does."""
    if len(escaped(queue).encode()) <= LONGEST_BYTES and not re.search(UNFIT, queue):
        return queue
    beginning = re.sub(NOT_PLAIN, "", queue[:BEGINNING])
    return f"{beginning}~{hashlib.sha256(queue.encode()).hexdigest()[:HASH_DIGITS]}"


def is_shortened(name: str) -> bool:
    """Tell whether a name in a path stands for another one."""
    return re.search(SHORT, name) is not None


def shortened_column(queue: Column) -> Column:
    """Have Spark do the same as :func:`shortened`."""
    size = f.octet_length(queue) + 2 * f.length(f.regexp_replace(queue, NOT_ESCAPED, ""))
    beginning = f.regexp_replace(f.substring(queue, 1, BEGINNING), NOT_PLAIN, "")
    digest = f.substring(f.sha2(queue.cast("binary"), 256), 1, HASH_DIGITS)
    short = f.concat(beginning, f.lit("~"), digest)
    return f.when((size <= LONGEST_BYTES) & ~queue.rlike(UNFIT), queue).otherwise(short)


def full_column(queue: Column, names: Mapping[str, str]) -> Column:
    """Give back the names that were shortened, each by its short one."""
    pairs = [f.lit(text) for pair in names.items() for text in pair]
    return f.coalesce(f.element_at(f.create_map(*pairs), queue), queue)
