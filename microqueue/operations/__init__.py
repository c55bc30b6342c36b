"""The only room where MongoDB filters and updates are written."""
