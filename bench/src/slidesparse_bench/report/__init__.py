"""Tables and plots from benchmark records, and from nothing else: no GPU, no torch, no measuring."""

from slidesparse_bench.report.page import write_report

__all__ = ["write_report"]
