"""The formats and rules of the segment store, pure: pages of its index logs, segment headers, places, key table, eviction."""
