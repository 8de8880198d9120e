"""Explains the error that ``experimental_run_tf_function=False`` causes in Keras 3's `compile`.

Horovod's documentation showed this option for years, and tf-keras accepts it. Keras 3 raises a
TypeError before it calls any object of ours, so we add an explanation when the error ends the
program.
"""

from __future__ import annotations

import functools
import sys
from types import TracebackType

_OPTION = "experimental_run_tf_function"
EXPLANATION = (
    f"Horovod: Keras 3 has no {_OPTION}, and Horovod does not need it there: leave it out of "
    "compile(). With tf-keras (TF_USE_LEGACY_KERAS=1) it is accepted."
)


@functools.cache
def explain_when_it_fails() -> None:
    """Install a hook that explains uncaught errors about that option."""
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        previous(kind, error, traceback)
        if isinstance(error, TypeError) and _OPTION in str(error):
            print(EXPLANATION, file=sys.stderr)

    sys.excepthook = hook
