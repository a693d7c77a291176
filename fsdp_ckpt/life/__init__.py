"""A run between restore and end: saves when due, goes back after a spike, ends when told to."""
