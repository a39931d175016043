"""What is a process? One rank: its start, its group, its task, its end."""
