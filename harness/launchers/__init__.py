"""Who starts processes? A file for each launcher, and one supervisor for all."""
