"""Chaos: real servers and processes, seeded faults, and a verifier outside of the queue."""
