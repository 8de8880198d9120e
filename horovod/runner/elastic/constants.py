"""Sentences and limits that tests and tools of upstream look up here."""

from __future__ import annotations

from horovod.runner.elastic.termination import RESET_LIMIT_EXCEEDED_MESSAGE

__all__ = ["RESET_LIMIT_EXCEEDED_MESSAGE"]
