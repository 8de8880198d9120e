"""A worker's side of an elastic job: the driver's decisions, and the generations they begin."""
