"""docs/knobs.md, the page about environment variables, which is made from the table of knobs.

``python -m horovod.common.knobs_page`` prints it.
"""

from __future__ import annotations

import sys

from horovod.common.config import COMPATIBILITY, KNOBS, Knob

_LAUNCHER_VARIABLES: tuple[tuple[str, str], ...] = (
    ("HOROVOD_RANK, HOROVOD_SIZE", "This process's rank and the number of ranks."),
    ("HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE", "The same among the ranks of this host."),
    (
        "HOROVOD_CROSS_RANK, HOROVOD_CROSS_SIZE",
        "The same among the hosts that have a process of this local rank.",
    ),
    ("HOROVOD_HOSTNAME", "This host's name as the launcher knows it."),
    (
        "HOROVOD_WORKER_ID",
        "This process's name in an elastic job, whose driver decides about ranks while it runs.",
    ),
    (
        "HOROVOD_GLOO_RENDEZVOUS_ADDR, HOROVOD_GLOO_RENDEZVOUS_PORT",
        "Where the launcher serves the job's store.",
    ),
    ("_HOROVOD_SECRET_KEY", "The job's key in base64. Keep it out of logs and command lines."),
)
"""Names and meaning of variables that launchers set for each rank; they are no knobs."""


def knobs_page() -> str:
    """Return the text of docs/knobs.md."""
    lines = [
        "# Environment variables",
        "",
        "<!-- Made by `python -m horovod.common.knobs_page` from horovod/common/config.py. -->",
        "",
        "Unset or empty means the default. Yes-or-no values are 1 or 0 (also true/false, yes/no,",
        "on/off). A value that cannot be understood is an error at `init`.",
    ]
    for section in dict.fromkeys(knob.section for knob in KNOBS):
        lines += ["", f"## {section}", ""]
        if section == COMPATIBILITY:
            lines += ["Known to upstream; they are read and checked but change nothing.", ""]
        lines += ["| Variable | Type | Default | Meaning |", "|---|---|---|---|"]
        lines += [_row(knob) for knob in KNOBS if knob.section == section]
    lines += ["", "## Set by launchers", "", "| Variable | Meaning |", "|---|---|"]
    for names, meaning in _LAUNCHER_VARIABLES:
        quoted = ", ".join(f"`{name}`" for name in names.split(", "))
        lines.append(f"| {quoted} | {meaning} |")
    return "\n".join(lines) + "\n"


def _row(knob: Knob) -> str:
    """Return the row of a knob in the table of its section."""
    kind = ", ".join(f"`{choice}`" for choice in knob.choices)
    if not kind:
        kind = {bool: "yes or no", int: "integer", float: "number", str: "text"}[knob.type]
    if knob.type is bool and knob.default is not None:
        default = "1" if knob.default else "0"
    elif knob.type is float and knob.default is not None:
        default = f"{knob.default:g}"
    else:
        default = "unset" if knob.default is None else str(knob.default)
    bound = "" if knob.minimum in (None, 0) or knob.type is float else f" At least {knob.minimum}."
    return f"| `{knob.env}` | {kind} | {default} | {knob.help}{bound} |"


if __name__ == "__main__":
    sys.stdout.write(knobs_page())
