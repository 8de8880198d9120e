"""Reducing gradients: what the ranks agree on, which buckets follow, and when each is reduced."""
