"""The replay: selected dead letters and archived tasks, sent back to a queue.

- ``job``: a run
- ``selection``: finding tasks by a SQL condition
"""
