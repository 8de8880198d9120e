"""Small things that users of services need: the errors of `timeout` and `network`, and `secret`."""

from __future__ import annotations
