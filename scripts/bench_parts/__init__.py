"""What the benchmarks share: a clock for all ranks, the state, the limits of the machine, DCP's own ways."""
