"""What the node asks of devices: submit a batch, poll completions, wait on a descriptor. Adapters implement these."""
