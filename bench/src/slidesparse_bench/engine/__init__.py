"""Whole models in vLLM, sparse through the plugin against stock dense vLLM: isolated requests and steps."""
