"""Comparison is arithmetic on records: nothing in this package trains, or starts a process."""
