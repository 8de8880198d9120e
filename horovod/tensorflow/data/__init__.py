"""Data processing outside the training processes, by TensorFlow's data service.

`compute_service` is what training scripts use; `compute_worker` is the command that starts the
processes which do the work.
"""

from __future__ import annotations
