"""Glue to other programs: no mathematics, and nothing of theirs is imported until they ask."""
