"""The agent's modules arrive in a bare Python, of the launcher's version or of another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from horovod.runner.agents import bootstrap
from horovod.runner.agents.bootstrap import pack_modules

SOURCE = Path(bootstrap.__file__).read_text()


@pytest.mark.parametrize("version", [sys.version, "3.99"], ids=["same", "another"])
def test_modules_work_where_no_horovod_is_installed(version: str):
    _, modules = pack_modules(
        "horovod.runner.agents.local_host", "horovod.runner.agents.agent_streams"
    )
    program = (
        f"{SOURCE}\nload_modules({(version, modules)!a})\n"
        "from horovod.runner.agents.local_host import parse_cores\n"
        "from horovod.runner.agents.agent_streams import event_frame\n"
        "import horovod.runner.agents.agent_streams\n"
        "print(parse_cores('0-2'), event_frame(b'x'))\n"
        "try:\n"
        "    import horovod.runner.slots.hosts\n"
        "except ImportError:\n"
        "    print('no other')\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-"], input=program, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "{0, 1, 2} b'\\x00\\x00\\x00\\x01\\x00x\\n'\nno other\n", done.stderr


def test_code_of_another_version_is_not_used():
    _, modules = pack_modules("horovod.runner.agents.local_host")
    spoilt = [(name, source, "00") for name, source, _ in modules]
    program = (
        f"{SOURCE}\nload_modules({('3.99', spoilt)!a})\nimport horovod.runner.agents.local_host\n"
    )
    subprocess.run(
        [sys.executable, "-I", "-S", "-"], input=program, text=True, check=True, timeout=60
    )
