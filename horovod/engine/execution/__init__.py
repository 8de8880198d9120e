"""Running what ranks have agreed on: fused, in the right memory, on the right transport."""
