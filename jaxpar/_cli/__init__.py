"""The command line: `train`, `plot`, `port` and `verify`."""
