"""What people look at: each reporter turns records into one thing."""
