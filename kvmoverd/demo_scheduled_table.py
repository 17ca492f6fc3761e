"""What the demo with a scheduler prints: a line a turn, and at the end the policies side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ERRORS_SHOWN = 20


def line_of(policy: str, event: Mapping[str, Any]) -> str:
    """One line of a turn that has ended, or of a message."""
    if "turn" not in event:
        return f"{policy}: {event.get('message', event)}"
    wrong = f"  ERROR {event['errors']}" if event["errors"] else ""
    return (
        f"{policy:<12}  {event['session']:<14} turn {event['turn']:>2}  hit {event['hit_tokens']:>6} tokens  "
        f"{event['bytes'] / 1e6:7.1f} MB  all layers {event['ready_ms'] / 1e3:6.2f} s  whole turn {event['seconds']:6.2f} s  "
        f"verified {event['verified_bytes'] / 1e6:7.1f} MB{wrong}"
    )


def compared(acts: Mapping[str, Mapping[str, Any]], policy: str, baseline: str) -> dict[str, Any]:
    """What `--json` prints: the policy's and the baseline's evenness by name, and all of each under `policies`."""
    return {
        "policy": policy,
        "snic_max_over_avg": acts[policy]["snic_max_over_avg"],
        "snic_max_over_avg_round_robin": acts[baseline]["snic_max_over_avg"] if baseline in acts else None,
        "policies": {name: dict(act) for name, act in acts.items()},
        "verified_bytes": sum(act["verified_bytes"] for act in acts.values()),
        "errors": [error for act in acts.values() for error in act["errors"]],
        "seconds": round(sum(act["seconds"] for act in acts.values()), 3),
    }


def table(acts: Mapping[str, Mapping[str, Any]], rate_bytes_per_s: int) -> str:
    """The closing words. `rate_bytes_per_s`: what each node's storage gives at most, 0 for no bound."""
    names = max(12, *(len(name) for name in acts))
    head = (
        f"{'policy':<{names}}{'requests':>10}{'read MB':>10}{'SNIC max/avg':>14}{'whole run':>11}"
        f"{'TTFT mean s':>13}{'p99 s':>8}{'seconds':>9}"
    )
    rows = [
        f"{name:<{names}}{act['done']:>4} of {act['requests']:>2}{sum(act['storage_read_bytes'].values()) / 1e6:>10.1f}"
        f"{act['snic_max_over_avg']:>14.3f}{act['snic_max_over_avg_whole']:>11.3f}{act['ttft_ms']['mean'] / 1e3:>13.2f}"
        f"{act['ttft_ms']['p99'] / 1e3:>8.2f}{act['seconds']:>9.1f}"
        for name, act in acts.items()
    ]
    bound = f", of {rate_bytes_per_s / 1e6:.1f} MB/s each" if rate_bytes_per_s else ""
    errors = [error for act in acts.values() for error in act["errors"]]
    verdict = "FAILED" if errors else "every byte was right"
    return "\n".join(
        [
            "",
            head,
            *rows,
            "(SNIC max/avg: the mean over all seconds in which the storage NICs were more than half busy; TTFT: until all",
            " layers of a prompt are in the prefill engine)",
            "",
            *(_reads(name, act, bound) for name, act in acts.items()),
            *(_rules(name, act) for name, act in acts.items()),
            "",
            f"verified bytes: {sum(act['verified_bytes'] for act in acts.values()):,}",
            f"errors: {len(errors)}; {verdict}",
            *(f"  {error}" for error in errors[:ERRORS_SHOWN]),
        ]
    )


def _reads(name: str, act: Mapping[str, Any], bound: str) -> str:
    reads = ", ".join(f"{node} {size / 1e6:.1f} MB" for node, size in act["storage_read_bytes"].items())
    return f"{name}, read from storage{bound}: {reads}"


def _rules(name: str, act: Mapping[str, Any]) -> str:
    rules = ", ".join(f"{rule} {count}" for rule, count in act["by_rule"].items())
    return f"{name}, assignments by why (prefill/decode/path): {rules or 'none'}"
