"""Benchmarks: results are checked first, then all implementations are timed in turn; figures are ratios within one run.

python -m mpicoll.run -n 2 -m mpicoll.bench                        all_reduce, 4 B ... 256 MiB, beside Gloo, MPI and memory
python -m mpicoll.run -n 2 -m mpicoll.bench all                    the table of targets (targets.py)
python -m mpicoll.bench summary FILE...                            several runs of it: median and spread
python -m mpicoll.run -n 2 -m mpicoll.bench check                  has speed been lost?

    options.py ──► harness.py, the ways to call ──► rounds.py, their times ──► row.py ──► table.py, output.py, plot.py
                   operations.py, messages.py                                             targets.py, check.py
"""
