"""Who listens to the node: a log, counters, several of them."""
