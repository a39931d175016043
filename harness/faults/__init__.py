"""Faults that can be injected into the ranks of a run, to prove that the checks can fail; never into the reference."""
