"""The configuration of run.py; a package, so that Hydra finds it when it is installed."""
