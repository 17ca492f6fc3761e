"""What the demo prints: a line per turn, and at the end a table by path and who read from storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLD_PATH = "auto_cold"
"""The turns after the restart, beside the replay's own names of paths."""
ERRORS_SHOWN = 20
SUMMED = ("verified_bytes", "errors", "seconds")
PLAN_WORDS = (
    "pooled: nobody, pools had all; prefill, decode: that node alone; split: both at once; helped: third nodes, too"
)


def summed(warm: Mapping[str, Any], cold: Mapping[str, Any] | None) -> dict[str, Any]:
    """One summary of both acts: paths side by side, the rest added up. `cold` is None when it was not played."""
    if cold is None:
        return dict(warm)
    reads, more = warm["storage_read_bytes"], cold["storage_read_bytes"]
    return {
        **warm,
        **{name: warm[name] + cold[name] for name in SUMMED},
        "paths": warm["paths"] | {COLD_PATH: cold["paths"]["auto"]},
        "storage_read_bytes": {node: reads[node] + more[node] for node in reads},
    }


def cold_line(read_rate: str | None) -> str:
    """Said between the acts. `read_rate`: None where storage has no bound."""
    gives = f"storage gives each node {read_rate} a second" if read_rate else "storage gives what it can"
    return f"all nodes start anew: pools are empty, {gives}; first turns once more"


def progress(event: Mapping[str, Any]) -> str:
    """One line of a turn that has ended, or of a message."""
    if "turn" not in event:
        return str(event.get("message", event))
    wrong = f"  ERROR {event['errors']}" if event.get("errors") else ""
    return (
        f"{event['session']} turn {event['turn']:>2}  {event['path']:<7}  hit {event['hit_tokens']:>6} tokens  "
        f"{event['bytes'] / 1e6:8.1f} MB  first layer {event['first_layer_ms']:7.1f} ms  "
        f"all layers {event['all_layers_ms']:7.1f} ms  verified {event['verified_bytes'] / 1e6:8.1f} MB{wrong}"
    )


def table(
    warm: Mapping[str, Any], cold: Mapping[str, Any] | None, *, rate_bytes_per_s: int, pool: str, transport: str
) -> str:
    """The closing words. `rate_bytes_per_s`: what one node's storage gives at most, 0 for no bound."""
    summary = summed(warm, cold)
    head = f"{'path':<9}{'turns':>6}{'hit tokens':>12}{'MB':>10}{'GB/s':>8}{'first layer ms':>16}{'all layers ms':>15}"
    rows = [
        f"{name:<9}{path['turns']:>6}{path['hit_tokens']:>12}{path['bytes'] / 1e6:>10.1f}"
        f"{path['gbytes_per_s']:>8.2f}{path['first_layer_ms']:>16.1f}{path['all_layers_ms']:>15.1f}"
        for name, path in summary["paths"].items()
    ]
    verdict = "every byte was right" if not summary["errors"] else "FAILED"
    return "\n".join(
        [
            "",
            head,
            *rows,
            "",
            *_readers("", warm),
            *(_readers("cold, ", cold) if cold else []),
            *(_saved(cold, rate_bytes_per_s) if cold else []),
            f"({PLAN_WORDS})",
            "",
            f"verified bytes: {summary['verified_bytes']:,}",
            f"node to node by {transport}; {warm['ways']}",
            f"errors: {len(summary['errors'])}; {verdict}; {summary['seconds']:.1f} s",
            *_errors(summary["errors"], pool),
        ]
    )


def _readers(act: str, summary: Mapping[str, Any]) -> list[str]:
    reads = ", ".join(f"{node} {size / 1e6:.1f} MB" for node, size in summary["storage_read_bytes"].items())
    plans = ", ".join(f"{why} {count}" for why, count in sorted(summary["plans"].items()))
    moved = ", ".join(f"{why} {count}" for why, count in sorted(summary["moved"].items()))
    told = [f"{act}read from storage: {reads}", f"{act}plans, by who reads: {plans or 'none'}"]
    return told + ([f"{act}blocks that moved to another reader, times by why: {moved}"] if moved else [])


def _saved(cold: Mapping[str, Any], rate_bytes_per_s: int) -> list[str]:
    """How long the cold turns took beside what one storage NIC needs for the same bytes."""
    path = cold["paths"]["auto"]
    took_s = path["all_layers_ms"] * path["turns"] / 1e3
    alone_s = sum(cold["storage_read_bytes"].values()) / rate_bytes_per_s if rate_bytes_per_s else 0.0
    if not alone_s:
        return []
    return [f"cold, all layers of all turns: {took_s:.2f} s; one node's storage alone would read for {alone_s:.2f} s"]


def _errors(found: list[str], pool: str) -> list[str]:
    errors = [f"  {error}" for error in found[:ERRORS_SHOWN]]
    if any(reason in error for error in errors for reason in ("POOL_EXHAUSTED", "TOO_BIG")):
        errors.append(f"  a prompt does not fit into a pool of {pool}: raise --pool, or lower --layers or --turns")
    return errors
