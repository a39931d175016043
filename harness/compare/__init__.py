"""What do records say? Pure arithmetic: no file, no clock, no process, no torch."""
