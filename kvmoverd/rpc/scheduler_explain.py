"""Why an assignment is as it is, in a message of bounded size."""

from __future__ import annotations

import json

from kvmover_proto import scheduler_pb2
from kvmoverd.core.scheduling.explain import NO_BOARD, Explain

CANDIDATES_MAX = 1_500
"""To work out what more of them looked like would hold the loop for tens of milliseconds."""
BYTES_MAX = 1 << 20


def explain_message(explain: Explain) -> scheduler_pb2.ExplainReply:
    """With every candidate, or with none where they are too many, or their names too long."""
    candidates = len(explain.prefill.board.seen) + len(explain.decode.board.seen)
    if candidates <= CANDIDATES_MAX:
        text, words = explain.text(), _json(explain, candidates=True)
        if len(text.encode()) <= BYTES_MAX and len(words.encode()) <= BYTES_MAX:
            return scheduler_pb2.ExplainReply(text=text, json=words)
    bare = explain._replace(
        prefill=explain.prefill._replace(board=NO_BOARD), decode=explain.decode._replace(board=NO_BOARD)
    )
    text = f"{bare.text()}\n{candidates} candidates are left out: they are more than {BYTES_MAX} bytes, or {CANDIDATES_MAX}"
    return scheduler_pb2.ExplainReply(text=text, json=_json(bare, candidates=False))


def _json(explain: Explain, *, candidates: bool) -> str:
    return json.dumps(explain.json(candidates=candidates), ensure_ascii=False)
