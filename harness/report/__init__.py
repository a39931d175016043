"""What do I see? A file for each reporter."""
