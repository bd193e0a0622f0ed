"""Leads editors from the functions of `_overloads.pyi` to their docstrings. Nothing imports it."""

from mpicoll._api.barriers import *  # noqa: F403
from mpicoll._api.exchanges import *  # noqa: F403
from mpicoll._api.gathers import *  # noqa: F403
from mpicoll._api.reductions import *  # noqa: F403
