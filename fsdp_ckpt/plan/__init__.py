"""Arithmetic on boxes and byte ranges, numpy only: which rank holds what, and where it lies in a file."""
