"""The pipelines: what data teams do with months of tasks, one file each.

    archive    finished tasks to Parquet, verified, then out of MongoDB
    ingest     files or tables into a queue, bad rows to a reject file
    report     throughput, waits, run times and the share of an objective that was kept
    triage     dead letters by kind of error, and the command that replays each kind
    replay     chosen tasks back into a queue, spread over a period, once per run
    storms     retries that came all at once, and the backoff that would have spread them
    simulate   the same arrivals and failures under other policies, workers and timeouts

Each has a function of its own name, which takes a Spark session and gives a frozen summary.
"""
