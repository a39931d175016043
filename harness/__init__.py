"""A training harness for data-parallel PyTorch."""
