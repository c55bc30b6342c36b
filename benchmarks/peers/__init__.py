"""Other task queues, measured beside microqueue: ``python -m benchmarks --only peers``."""
