"""The method, without a layer or a file: patterns, sliding, quantising, and the packed weight."""
