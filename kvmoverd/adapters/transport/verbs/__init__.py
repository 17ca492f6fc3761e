"""RDMA verbs: layers as chains of RDMA writes on a low-priority lane, to other nodes and, by loopback, within this one."""
