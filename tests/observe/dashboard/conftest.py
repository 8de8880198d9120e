"""What several tests of the dashboard share."""

from __future__ import annotations

import pytest


@pytest.fixture
def never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated ranks report when the test says so, which may be long ago on a busy machine."""
    monkeypatch.setattr("horovod.observe.dashboard.stragglers.SILENT_SECONDS", 3600.0)
