"""What is known of a sweep: numbers, tables, notes."""
