"""Is it right? The ranks' steps are captured, and one process replays them."""
