"""A compiled model: its programs, the memory that they share, and what users have of it."""
