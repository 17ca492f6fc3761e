"""Pure rules: layouts, keys, slots, leases and one state machine per kind of request. No I/O, no clock, no logging."""
