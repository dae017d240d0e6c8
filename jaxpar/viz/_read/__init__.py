"""From a function to its equations, regions, sources and costs."""
