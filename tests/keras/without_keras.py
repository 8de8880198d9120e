"""Imported by the fork server after TensorFlow, which brings a Keras with itself as the backend.

Ranks shall import the Keras that their own environment asks for.
"""

from __future__ import annotations

import sys

for _name in [name for name in sys.modules if name.split(".")[0] == "keras"]:
    del sys.modules[_name]
