"""How layers travel: within the process, between processes of one machine, and over TCP."""
