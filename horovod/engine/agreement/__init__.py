"""From what each rank has submitted to what all of them run next."""
