"""What the commands of the command line do, apart from parsing and printing."""
