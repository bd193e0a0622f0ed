"""Benchmarks: results are checked first, then all implementations are timed in turn; figures are ratios within one run.

options.py ──► harness.py, the ways to call ──► rounds.py, their times ──► row.py ──► table.py, output.py
               operations.py, messages.py
"""
