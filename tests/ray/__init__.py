"""Tests of `horovod.ray` on a real cluster of three nodes."""
