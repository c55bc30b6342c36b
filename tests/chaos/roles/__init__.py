"""The processes of a run: producers, workers of every kind, a supervisor, sweepers."""
