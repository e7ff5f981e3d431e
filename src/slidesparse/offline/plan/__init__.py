"""Which pattern each layer takes."""
