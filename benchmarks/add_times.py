"""Check a file that ``slidesparse tune --share`` wrote on another machine, and add it to the tables that ship.

python benchmarks/add_times.py FILE            # check it, and show what it says
python benchmarks/add_times.py FILE --write    # and add it to src/slidesparse/gemm/speed_tables/
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slidesparse.errors import SlideSparseError
from slidesparse.offline.tune import describe_shared
from slidesparse_bench import sent_times


def main() -> int:
    """Check, show and add."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="add it to the tables that ship")
    options = parser.parse_args()
    try:
        table = sent_times.read(options.file)
    except SlideSparseError as error:
        print(error, file=sys.stderr)
        return 1
    print(describe_shared(table, options.file))
    if options.write:
        print(f"added to {sent_times.add_to_package(table)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
