"""slidesparse-bench: measure slidesparse on a GPU, and draw what was measured.

Every measurement becomes a :class:`slidesparse_bench.records.Record` or a record of a served load
(:mod:`slidesparse_bench.served_records`); tables and plots are drawn from those by :mod:`slidesparse_bench.report`,
never here. ``slidesparse bench`` and ``report`` are its commands.
"""
