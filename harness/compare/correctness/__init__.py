"""Did N ranks train what one process trains? Checks R0 to R14 on what a verification recorded."""
