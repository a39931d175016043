"""How do I start? Hydra's jobs, spawn(), the launch command."""
