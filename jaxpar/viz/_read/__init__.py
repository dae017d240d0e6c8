"""From a function's jaxpr to flat equations: `jaxpr.read`."""
