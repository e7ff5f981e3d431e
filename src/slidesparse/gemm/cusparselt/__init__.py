"""The cuSPARSELt backend: the installed wheel through ctypes, and which of its algorithms is the fastest."""
