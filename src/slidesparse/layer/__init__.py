"""Layers of linears and of a mixture's experts, and the choice of a loaded weight's form."""
