"""A linear or the experts of a mixture, as layers: what a loaded weight becomes, and running it."""
