"""How processes notice that one of them is lost. No JAX here."""
