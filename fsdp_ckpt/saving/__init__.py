"""One save, from live state to a committed checkpoint, and those that are under way."""
