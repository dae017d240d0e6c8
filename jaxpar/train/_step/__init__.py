"""The training step: pure functions of a state and a batch."""
