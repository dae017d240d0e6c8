"""A run as a value: any of its steps again, its batches, forks of it, and what differs between two runs."""
