"""The collectives: their blocking, asynchronous, differentiable and compiled forms, and handles."""
