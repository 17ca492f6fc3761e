"""Which nodes there are: a fixed list."""
