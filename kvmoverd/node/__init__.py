"""The node: runs the core's machines against the ports. One loop, no threads of its own, no gRPC."""
