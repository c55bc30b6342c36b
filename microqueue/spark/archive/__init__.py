"""The archive: finished tasks in Parquet files, verified, then deleted from MongoDB.

job         the run: write, read back and compare, commit, delete
log         the committed entries that name the files
files       the Parquet files and the queue names in their paths
direct      files written by the executors themselves, on a shared disk
purge       deleting archived tasks from MongoDB
compaction  merging small files
reader      reading an archive
"""
