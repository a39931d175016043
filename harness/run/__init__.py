"""What is a run? Its plan, its records and its folder: plain data, JSON."""
