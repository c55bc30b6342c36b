"""Run operations: over pymongo, Motor, PyMongo's async client, or mongomock."""
