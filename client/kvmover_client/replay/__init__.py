"""Replay: two engines that play an agent trace through a prefill and a decode node, and check every byte they get.

`trace` reads sessions of turns, `tokens` makes their token ids, `kv` says which bytes belong to a token, `pages` holds
an engine's memory, `engines` are the two engines, `turns` plays one turn on both, `player` plays sessions, `report`
counts.
"""

from __future__ import annotations

from pathlib import Path


def traces_path() -> Path:
    """The built-in trace: a small cut of real coding-agent sessions."""
    return Path(__file__).parent / "traces" / "claude_code_sessions.jsonl"
