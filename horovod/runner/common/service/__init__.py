"""Services that processes of one or several jobs talk to: `compute_service`."""
