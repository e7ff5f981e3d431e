"""Engines under load: what users of a server feel, what it draws, and whether it lasts."""
