"""Collectives as operations of TensorFlow, in eager code and in graphs."""
