"""One restore, from the newest whole checkpoint to the live state."""
