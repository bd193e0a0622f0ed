"""What the ordinary suite leaves out."""

collect_ignore = ["test_types.py"]  # type checkers; runs where it is named: `python -m pytest tests/project/test_types.py`
