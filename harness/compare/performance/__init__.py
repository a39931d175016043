"""Which is faster, and is that known? Statistics on what runs recorded."""
