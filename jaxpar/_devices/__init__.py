"""Arrays on devices and between them."""
