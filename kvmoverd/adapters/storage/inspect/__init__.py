"""Looks at stores from outside: with no daemon, or beside running ones, and without writing unless it is asked to repair."""
