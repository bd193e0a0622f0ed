"""``python -m mpicoll.bench model``: estimates of what each algorithm costs on another machine. It measures nothing.

costs.py ──► algorithms.py, the table ──► command.py, which prints times for one machine
                                          page.py, which prints the tables of docs/model.md
"""
