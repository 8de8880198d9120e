"""Strangers at the door: attacks on jobs that really train, and what they must not find."""
