"""A deterministic simulation: producers, workers, sweepers and others against a model of MongoDB.

The operations of the package perform no I/O. Here a scheduler performs their calls, one at a time,
on a model of MongoDB with virtual time. A seed decides which actor is next, and where requests and
replies are lost, actors crash and primaries fail. So a seed that fails is replayed exactly.

    python -m tests.simulation --seed 1 --steps 1000000
"""
