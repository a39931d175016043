"""Can the checks fail? Faults that are put into the ranks."""
