"""Between accelerators: torch's NCCL and XCCL process groups, and copies through host memory."""
