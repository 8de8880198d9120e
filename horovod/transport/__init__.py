"""Moving bytes between ranks. Knows nothing of tensor names, frameworks or readiness."""
