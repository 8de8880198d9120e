"""Run the command ``python -m horovod.timeline``, which merges timelines and reports on them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from horovod.observe.reports.advice import advise
from horovod.observe.reports.analysis import analyse
from horovod.observe.reports.page import page
from horovod.observe.reports.text import report
from horovod.observe.timeline.clocks import align
from horovod.observe.timeline.merging import merge
from horovod.observe.timeline.recording import read_recordings

HOW_TO = """\
Record: set HOROVOD_TIMELINE=/tmp/run.json for the job (horovodrun --timeline-filename does), or
call hvd.start_timeline("/tmp/run.json"). Rank 0 writes /tmp/run.json, rank 1 /tmp/run.rank1.json
and so on, each on its own host; collect them in one folder. They may be read while training runs,
and after a crash.

Explain: python -m horovod.timeline report --html report.html run*.json

Merge:   python -m horovod.timeline merge all.json run*.json

View:    open https://ui.perfetto.dev (or chrome://tracing in Chrome) and drop the merged file
         into it: hosts are processes, ranks are threads, and arrows lead from the rank that
         submitted a collective last to those that waited for it.
"""

_HELP: dict[str, Any] = {
    "formatter_class": argparse.RawDescriptionHelpFormatter,
    "epilog": HOW_TO,
}


def main(arguments: Sequence[str] | None = None, prog: str = "python -m horovod.timeline") -> int:
    """Run the command line, and return the exit status.

    Args:
        arguments: The arguments; by default those of this process.
        prog: The name of the command in messages.
    """
    told = "Work with the timelines that Horovod records."
    parser = argparse.ArgumentParser(prog, **_HELP, description=told)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in (
        ("merge", "put the files of several ranks into one trace, on one clock"),
        ("report", "say where steps spend their time, which rank is slow, and what to try first"),
    ):
        told = f"{what[0].upper()}{what[1:]}."
        each = commands.add_parser(name, help=what, **_HELP, description=told)
        if name == "merge":
            each.add_argument("output", metavar="OUT", help="the file to write")
        else:
            page_help = "also write the report as one page for a browser"
            each.add_argument("--html", metavar="OUT.html", help=page_help)
        each.add_argument("files", metavar="FILE", nargs="+", help="the ranks' files, in any order")
    options = parser.parse_args(arguments)
    try:
        if options.command == "merge":
            count = merge(options.files, options.output)
            print(f"{options.output}: {count} rank(s). Open it in https://ui.perfetto.dev")
        else:
            _report(options.files, options.html)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _report(files: Sequence[str], html: str | None) -> None:
    """Print the report, and write it as a page if that is asked for."""
    if html is not None and html.endswith(".json"):
        raise ValueError(f"--html {html} looks like a timeline: name a file to write, OUT.html")
    analysis = analyse(align(read_recordings(files)))
    advice = advise(analysis)
    sys.stdout.write(report(analysis, advice))
    if html is not None:
        with open(html, "w", encoding="utf-8") as file:
            file.write(page(analysis, advice))
        print(f"\n{html}: open it in a browser")
