"""The benchmarks: problems, the timing protocol, and the measurements that use them.

Every measurement becomes a :class:`slidesparse.records.Record`; tables and plots are drawn from those by
:mod:`slidesparse.report`, never here.
"""
