"""Read-only pipelines over archived and live tasks.

- ``report``: throughput, waits, run times and rates
- ``triage``: dead letters by kind of error, with the commands that replay them
- ``storms``: retry storms, and the backoff that would have prevented them
- ``simulate``: recorded tasks under other policies, workers and timeouts

They share:

- ``task_source``: archived and live tasks in one DataFrame
- ``fingerprint``: which errors are of the same kind
- ``queue_model``: the simulated queue, and recordings of real tasks
- ``html``: self-contained pages with charts
- ``pages``: the pages of the report and of the simulation
"""
