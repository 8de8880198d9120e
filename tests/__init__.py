"""The test suite. It mirrors the package path by path; `tests.ranks` starts real ranks."""
