"""The reference: one process that does what the ranks do, in pieces that each do one of its jobs."""
