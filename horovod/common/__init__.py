"""What every layer needs: configuration, topology, errors, authenticated messages."""
