"""How many examples property-based tests try: few by default, all in `make test-long`.

Most tests try other examples in every run, so what is rare is found over many runs.
"""

from __future__ import annotations

import os

LONG = os.environ.get("HOROVOD_TEST_LONG") == "1"
_SHORT = 4  # examples of a short run are this many times fewer
_LEAST = 5  # and no fewer than this, or as many as the test asks for


def examples(number: int) -> int:
    """Return how many of a test's examples are to be tried in this run."""
    return number if LONG else min(number, max(_LEAST, number // _SHORT))
