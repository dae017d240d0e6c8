"""Once over every example: evaluation, predictions, and where a classifier is wrong."""
