"""Microqueue inside other programs."""
