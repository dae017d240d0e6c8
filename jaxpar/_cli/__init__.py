"""The command line: `train`, `plot` and `verify`."""
