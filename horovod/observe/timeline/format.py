"""Define the names in a rank's file that its recorder and its readers share."""

from __future__ import annotations

START_TIME = "start_time_since_epoch_in_micros"
NEGOTIATE = "NEGOTIATE_"  # begins the name of the event before a collective

# Spans that upstream does not have.
WAIT = "WAIT"  # a thread of the program waits for results
STEP = "STEP"  # from the end of one exchange of gradients to the end of the next
BACKWARD = "BACKWARD"  # from the first gradient of a step until they are waited for

VERSION = 2  # version 1 has no spans, no clock and no numbers; upstream's files have no version

DEVICES = ("NCCL", "XCCL")  # transports whose collectives run on a device, by its clock
