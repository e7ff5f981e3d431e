"""Checkpoints and other files on disk."""
