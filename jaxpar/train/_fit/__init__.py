"""The training loop: progress, metrics, checkpoints, interrupts."""
