"""The measuring instrument: problems, the timing protocol, and the benchmarks that use them.

Everything that is measured becomes a :class:`slidesparse.records.Record`; tables and plots are drawn from those by
:mod:`slidesparse.report`, never here.
"""
