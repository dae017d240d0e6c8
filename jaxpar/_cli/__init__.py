"""The command line: `train` and `plot`."""
