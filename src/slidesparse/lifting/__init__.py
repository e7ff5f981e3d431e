"""Activations: normalised, quantised and lifted in one pass, by torch (the definition) or by Triton."""
