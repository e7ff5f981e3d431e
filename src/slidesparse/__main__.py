"""Run the command line as ``python -m slidesparse``."""

from slidesparse.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
