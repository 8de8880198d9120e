"""What ranks know of a store: paths, and how to bring what they wrote there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RemoteStore:
    """The paths of one run; `get_local_output_dir` and `sync` are used by rank 0."""

    train_data_path: str
    val_data_path: str
    test_data_path: str
    saving_runs: bool
    runs_path: str
    run_path: str
    checkpoint_path: str | None
    logs_path: str | None
    checkpoint_filename: str
    logs_subdir: str
    get_local_output_dir: Callable[[], Any]
    sync: Callable[[str], None]
    storage_options: dict[str, Any] | None = None
