"""The only package where MongoDB filters and updates are written."""
