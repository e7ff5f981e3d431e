"""The cuSPARSELt backend: the installed wheel through ctypes, and the search for its fastest algorithm."""
