"""What saves and loads the same state beside this package, and what its claims are worth."""
