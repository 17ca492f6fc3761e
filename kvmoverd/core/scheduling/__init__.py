"""Who prefills a request, who decodes it, and who reads its blocks: the scheduler's state and policies, pure.

Reports and requests go in, assignments come out; time is an argument. The same code serves a cluster, replays a decision log
and runs in a simulation. `docs/scheduling.md` has the rules.
"""
