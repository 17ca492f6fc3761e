"""Real RDMA verbs on a machine without an RDMA NIC: one small throw-away VM whose kernel has Soft-RoCE.

`image` makes kernel and initial filesystem from Debian packages, once; `vm` boots them under qemu and runs one command;
`inside` is that command for the suite: all parts one after another; the tests beside it look at what each part left.
"""
