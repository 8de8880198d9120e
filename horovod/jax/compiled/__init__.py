"""Collectives inside of compiled programs."""
