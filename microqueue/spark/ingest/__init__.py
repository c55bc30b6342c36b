"""The ingest: rows of files or tables as tasks, and a file of rejected rows.

- ``job``: a run, and the reject file
- ``source``: reading CSV, JSON lines, Parquet or a table
- ``rows``: validating rows and adding tasks, in the executors
"""
