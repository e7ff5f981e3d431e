"""Helpers that know nothing of sparsity: JSON files, caches, progress, devices, private interfaces."""
