"""Benchmarks of the queue: ``python -m benchmarks --help``."""
