"""The codes of the errors that reads, writes and pipelines of Spark raise.

Options and payloads also have errors whose codes are not about Spark, such as ``unknown_option``.
"""

from __future__ import annotations

from microqueue import durations

NO_TIMEZONE = durations.NO_TIMEZONE
UNKNOWN_COLUMN = "unknown_column"
REPEATED_NAME = "repeated_name"
UNSUPPORTED_TYPE = "unsupported_type"
WRONG_TYPE = "wrong_type"
CONFLICTING_OPTIONS = "conflicting_options"
ONLY_STREAMS = "only_streams"
NO_STREAMS = "no_streams"
APPEND_ONLY = "append_only"
NOT_AN_INSTANT = "not_an_instant"
NOT_JSON = "not_json"
NOT_AN_OBJECT = "not_an_object"
NOT_SQL = "not_sql"
NO_KEY = "no_key"
NO_QUEUE = "no_queue"
NULL_KEY = "null_key"
TOO_MANY_DIGITS = "too_many_digits"
MISSING = "missing"
UNKNOWN_FIELD = "unknown_field"
UNKNOWN_FORMAT = "unknown_format"
UNREADABLE = "unreadable"
EMPTY = "empty"
HEADERS_DIFFER = "headers_differ"
NOT_A_FILE = "not_a_file"
IS_SOURCE = "is_source"
NO_SOURCE = "no_source"
OTHER_OPTIONS = "other_options"
RUN_TOO_OLD = "run_too_old"
NO_ARCHIVE = "no_archive"
NO_LOG = "no_log"
DAMAGED_LOG = "damaged_log"
OTHER_DATABASE = "other_database"
DISK_NOT_SHARED = "disk_not_shared"
FILES_DIFFER = "files_differ"
TAKEN_OVER = "taken_over"
NO_TASKS = "no_tasks"
NOT_A_STATE = "not_a_state"
NO_MATPLOTLIB = "no_matplotlib"

MEANINGS = {
    UNKNOWN_COLUMN: "names a column that does not exist",
    REPEATED_NAME: "has a column, or a field of a struct, more than once",
    UNSUPPORTED_TYPE: "has a type that MongoDB lacks",
    WRONG_TYPE: "has another type than the one that is needed",
    CONFLICTING_OPTIONS: "has options that exclude each other",
    ONLY_STREAMS: "has an option that only streams have",
    NO_STREAMS: "has an option that streams do not have",
    APPEND_ONLY: "would overwrite a queue",
    NO_TIMEZONE: "has an instant without a timezone",
    NOT_AN_INSTANT: "has text that is no ISO 8601 instant",
    NOT_JSON: "has text that is no JSON",
    NOT_AN_OBJECT: "has JSON that is no object",
    NOT_SQL: "has a condition that is no SQL, or does not fit the columns",
    NO_KEY: "does not say which columns identify a row, and needs them",
    NO_QUEUE: "does not say into which queue rows are written",
    NULL_KEY: "has a row without a key",
    TOO_MANY_DIGITS: "has a decimal of more than 34 digits",
    MISSING: "lacks a field that the schema has",
    UNKNOWN_FIELD: "has a field that the schema lacks",
    UNKNOWN_FORMAT: "has a source whose format is not known",
    UNREADABLE: "has a source that Spark cannot read",
    EMPTY: "has a source without a header",
    HEADERS_DIFFER: "has files whose headers differ",
    NOT_A_FILE: "needs the name of a file",
    IS_SOURCE: "would replace a file of its source",
    NO_SOURCE: "has nothing to read",
    OTHER_OPTIONS: "has the name of a run that was begun with other options",
    RUN_TOO_OLD: "is too old to be resumed",
    NO_ARCHIVE: "has a path at which there is no archive",
    NO_LOG: "has an archive whose log is lost",
    DAMAGED_LOG: "has an archive whose log has a damaged entry",
    OTHER_DATABASE: "has an archive with an unfinished run of another database",
    DISK_NOT_SHARED: "wrote files that only the executors see",
    FILES_DIFFER: "read other tasks back than it wrote",
    TAKEN_OVER: "has an archive that another run has taken over",
    NO_TASKS: "found no tasks to simulate",
    NOT_A_STATE: "has a state file that no triage wrote",
    NO_MATPLOTLIB: "draws charts without matplotlib",
}
"""What a call with each error does or has, as ``docs/spark.md`` says it: "the call ..."."""
