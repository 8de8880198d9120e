"""A program that stands in for ssh: every "host" is this machine, with a clean environment.

What the name of a host begins with decides what becomes of the connection.
"""

from __future__ import annotations

import os
from pathlib import Path

SCRIPT = r"""#!/bin/sh
printf '%s\n' "$@" -- >> "$STUB_LOG"
while :; do
    case "$1" in
        -o|-p|-i) shift 2 ;;
        -T) shift ;;
        *) break ;;
    esac
done
host=$1
[ "$2" = -- ] || { echo "stub: no -- behind the host" >&2; exit 2; }
shift 2
connection="127.0.0.1 40000 127.0.0.1 22"
case $host in
    unknown*) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2
              exit 255 ;;
    stranger*) echo "Host key verification failed." >&2; exit 255 ;;
    mute*) exit 255 ;;
    silent*) echo "still trying" >&2; exec sleep 1000 ;;
    noisy*) echo "Welcome to $host"; echo "Unauthorized use is prohibited" >&2 ;;
    pythonless*) set -- "$(printf %s "$*" | sed 's,/python[0-9.]*,/no/such/python,')" ;;
    distant*) connection="192.0.2.7 40000 192.0.2.9 22" ;;
esac
exec env -i HOME="$STUB_HOME" USER=me PATH=/usr/bin:/bin SSH_CONNECTION="$connection" \
    /bin/sh -c "$*"
"""


def install(folder: Path) -> dict[str, str]:
    """Variables with which horovodrun finds the stub; it logs its arguments to folder/log."""
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SCRIPT)
    program.chmod(0o755)
    home = folder / "home"
    home.mkdir()
    return {
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "STUB_LOG": str(folder / "log"),
        "STUB_HOME": str(home),
    }
