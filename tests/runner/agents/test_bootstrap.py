"""The agent's modules arrive in a bare Python, of the launcher's version or of another."""

from __future__ import annotations

import marshal
import subprocess
import sys
from pathlib import Path

import pytest

from horovod.runner.agents import bootstrap
from horovod.runner.agents.bootstrap import Packed, pack_modules

SOURCE = Path(bootstrap.__file__).read_text()


def run_bare(packed: Packed, program: str) -> str:
    """Load the modules in a Python that sees nothing of ours, and return what a program prints."""
    prelude = f"{SOURCE}\nload_modules(marshal.loads({marshal.dumps(packed)!r}))\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-"],
        input=prelude + program,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("version", [sys.version, "3.99"], ids=["same", "another"])
def test_modules_work_where_no_horovod_is_installed(version: str):
    _, modules = pack_modules(
        "horovod.runner.agents.local_host", "horovod.runner.agents.agent_streams"
    )
    program = (
        "from horovod.runner.agents.local_host import parse_cores\n"
        "from horovod.runner.agents.agent_streams import event_frame\n"
        "import horovod.runner.agents.agent_streams\n"
        "print(parse_cores('0-2'), event_frame(b'x'))\n"
        "try:\n"
        "    import horovod.runner.slots.hosts\n"
        "except ImportError:\n"
        "    print('no other')\n"
    )
    printed = run_bare((version, modules), program)
    assert printed == "{0, 1, 2} b'\\x00\\x00\\x00\\x01\\x00x\\n'\nno other\n"


def test_code_of_another_version_is_not_used():
    _, modules = pack_modules("horovod.runner.agents.local_host")
    spoilt = [(name, source, b"0") for name, source, _ in modules]
    run_bare(("3.99", spoilt), "import horovod.runner.agents.local_host\n")


def test_an_agent_imports_few_modules():
    """Each of these takes milliseconds, and hundreds of agents may start at once."""
    names = ("bootstrap", "local_host", "agent_streams", "agent", "probe")
    packed = pack_modules(*(f"horovod.runner.agents.{name}" for name in names))
    question = {
        "endpoints": [("127.0.0.1", 1)],
        "key": "00" * 32,
        "timeout": 60.0,
        "nics": ["lo"],
        "towards": ["127.0.0.1"],
    }
    program = (
        "from horovod.runner.agents import agent_streams, local_host, probe\n"
        "local_host.become_subreaper()\n"
        f"answer = probe.probe({question})\n"
        "agent_streams.to_json(answer['failures'])\n"
        "print(*sys.modules)\n"
    )
    slow = {"ctypes", "enum", "hashlib", "json", "re", "selectors", "signal", "socket", "threading"}
    assert slow.isdisjoint(run_bare(packed, program).split())
