"""Live training objects to state dicts and back."""
