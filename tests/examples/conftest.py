"""What the examples import beside torch: the fork server does it once for all that are forked."""

from __future__ import annotations

from tests import rank_process

if "sklearn.datasets" not in rank_process.PRELOAD:
    rank_process.PRELOAD += ["sklearn.datasets", "sklearn.model_selection"]
