"""Benchmarks: results are checked first, then all implementations are timed in turn; figures are ratios within one run.

python -m mpicoll.run -n 2 -m mpicoll.bench                        all_reduce, 4 B ... 256 MiB, beside Gloo, MPI and memory
python -m mpicoll.run -n 2 -m mpicoll.bench tune                   a table of thresholds for MPICOLL_TUNING

    options.py ──► harness.py, the ways to call ──► rounds.py, their times ──► row.py ──► table.py, output.py
                   operations.py, messages.py
"""
