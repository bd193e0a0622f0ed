"""Benchmarks: scripts that check the result first, then measure; figures are ratios within one run.

python -m mpicoll.run -n 2 -m mpicoll.bench                 what mpicoll adds to a call, against mpi4py on NumPy memory
"""
