"""Two networks compared: their layers matched, and drawn as one picture with what changed."""
