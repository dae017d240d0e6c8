"""What `fit` calls after steps and epochs: the protocol, and what jaxpar brings for it."""
