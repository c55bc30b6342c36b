"""The archive: finished tasks in Parquet files, verified, then deleted from MongoDB.

- ``job``: a run (write, read back and compare, commit, delete), and merging small files
- ``log``: the entries that commit files
- ``parquet``: the files, their paths, and how they are written and verified
- ``purge``: deleting archived tasks from MongoDB
- ``reader``: reading an archive
"""
