"""The four ways to start ranks, behind one protocol, watched by one supervisor. Nothing else starts a process."""
