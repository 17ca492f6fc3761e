"""Layout B: per-node append-only segments, found by index logs that every node tails."""
