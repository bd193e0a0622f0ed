"""Runs the Python sessions of a page as one doctest: ``python session.py PAGE``."""

import doctest
import sys
from pathlib import Path

from tests.docs import blocks

page = Path(sys.argv[1])
test = doctest.DocTestParser().get_doctest(blocks.session(page), {}, page.stem, str(page), 0)
sys.exit(doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed > 0)
