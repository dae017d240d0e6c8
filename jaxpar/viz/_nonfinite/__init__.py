"""Where a NaN or an infinity begins: the function is run once, and each equation looks at its result."""
