"""From named requests, submitted in any order, to agreed and fused collectives."""

from __future__ import annotations

from horovod.engine.torch_version import warn_about_torch

warn_about_torch()
