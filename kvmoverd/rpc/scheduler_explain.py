"""Why an assignment is as it is, in a message of bounded size."""

from __future__ import annotations

import json

from kvmover_proto import scheduler_pb2
from kvmoverd.core.scheduling.explain import NO_BOARD, Explain

CANDIDATES_MAX = 1_500
"""More would be over the bound of the message with names of full length, and hold the loop for tens of milliseconds."""
BYTES_MAX = 1 << 20


def explain_message(explain: Explain) -> scheduler_pb2.ExplainReply:
    """With every candidate, or with none where they are too many."""
    candidates = len(explain.prefill.board.seen) + len(explain.decode.board.seen)
    if candidates > CANDIDATES_MAX:
        explain = explain._replace(
            prefill=explain.prefill._replace(board=NO_BOARD),
            decode=explain.decode._replace(board=NO_BOARD),
        )
    text = explain.text()
    if candidates > CANDIDATES_MAX:
        text += f"\n{candidates} candidates are left out, at most {CANDIDATES_MAX} are shown"
    words = json.dumps(explain.json(candidates=candidates <= CANDIDATES_MAX))
    return scheduler_pb2.ExplainReply(text=text[:BYTES_MAX], json=words)
