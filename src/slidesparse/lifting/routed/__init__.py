"""Activations of mixtures: rows in the order of their experts, lifted, and summed again."""
