"""`python -m jaxpar launch`: several processes on this machine. No JAX here."""
