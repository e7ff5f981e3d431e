"""The commands of the command line, apart from parsing and printing."""
