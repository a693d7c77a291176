"""Two checkpoints, or one and a model's files: what differs, and whether they fit."""
