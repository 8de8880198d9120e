"""How a process finds the other ranks of its job."""
