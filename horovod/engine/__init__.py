"""From named requests, submitted in any order, to agreed and fused collectives."""
