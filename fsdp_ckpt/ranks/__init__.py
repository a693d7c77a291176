"""What ranks tell each other: with deadlines, through a store, without collectives."""
