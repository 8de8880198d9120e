"""Jobs started by LSF's jsrun, for programs that call upstream's launcher: `horovodrun --jsrun`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from horovod.runner.common.util.settings import BaseSettings
from horovod.runner.foreign_run import run_elsewhere
from horovod.runner.jobs import controllers


def is_jsrun_installed() -> bool:
    return shutil.which("jsrun") is not None


def js_run(
    settings: BaseSettings,
    nics: Collection[str] | None,
    env: Mapping[str, str] | None,
    command: str | Sequence[str],
    stdout: Any = None,
    stderr: Any = None,
) -> None:
    """Run a command with jsrun. Unless `settings.run_func_mode`, this process becomes jsrun."""
    run_elsewhere(controllers.JSRUN, settings, None, os.environ if env is None else env, command)
