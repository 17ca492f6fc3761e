"""What Linux says of itself under /sys and /proc: pure readers over a root directory, which tests fake."""
