"""One technology each, behind the ports. Adapters never import the node, nor each other across packages."""
