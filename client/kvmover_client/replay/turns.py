"""One turn on both engines at once, with further attempts where the daemons say that one may help."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvmover_client import DaemonGone, KvmoverError
from kvmover_client.replay.engines import Decoded, DecodeEngine, Prefilled, PrefillEngine
from kvmover_client.replay.pages import OutOfPages
from kvmover_client.replay.request import AttemptFailed, ReadPath, Request, StoredBlocks

ATTEMPTS_MAX = 3
ATTEMPT_S = 180.0
RETRY_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Played:
    """Outcome of a turn. `prefilled` and `decoded` are absent when no attempt succeeded.

    `failures` says how the attempts before ended; they are no errors when a later one succeeded.
    """

    prefilled: Prefilled | None
    decoded: Decoded | None
    seconds: float
    failures: Sequence[str] = ()
    errors: Sequence[str] = ()

    @property
    def succeeded(self) -> bool:
        return self.decoded is not None


class Stage:
    """Both engines, and what they know to be stored."""

    def __init__(self, prefill: PrefillEngine, decode: DecodeEngine, decode_node: str) -> None:
        self.prefill = prefill
        self.decode = decode
        self.decode_node = decode_node
        self.stored = StoredBlocks()

    async def play(self, request: Request, path: ReadPath) -> Played:
        """Never raises for what a daemon did: that is in `errors`."""
        expected_blocks = self.stored.prefix_blocks(request.keys[: request.prompt_blocks])
        await self.prefill.wait_found(request.keys[:expected_blocks])
        begun_s = time.monotonic()
        failures: list[str] = []
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                # In a task of its own: before Python 3.11.3 a task whose group failed stays marked as being cancelled,
                # and the next time limit in it would end as a cancellation.
                prefilled, decoded = await asyncio.create_task(self._attempt(request, attempt, path))
            except AttemptFailed as failure:
                failures.append(f"attempt {attempt}: {failure}")
                if not failure.retryable:
                    break
                await asyncio.sleep(RETRY_PAUSE_S * attempt)
                continue
            self.stored.add(decoded.durable_keys)
            errors = prefilled.errors + decoded.errors + too_few(prefilled, expected_blocks, request)
            return Played(prefilled, decoded, time.monotonic() - begun_s, failures, errors)
        return Played(None, None, time.monotonic() - begun_s, failures, failures)

    async def _attempt(self, request: Request, attempt: int, path: ReadPath) -> tuple[Prefilled, Decoded]:
        """Both engines together: when one fails the other is cancelled. Raises `AttemptFailed`."""
        try:
            async with asyncio.timeout(ATTEMPT_S), asyncio.TaskGroup() as group:
                decoding = group.create_task(self.decode.decode(request, attempt))
                prefilling = group.create_task(self.prefill.prefill(request, attempt, self.decode_node, path.choice))
        except TimeoutError:
            raise AttemptFailed(f"not over within {ATTEMPT_S:g} s", retryable=False) from None
        except ExceptionGroup as group_error:
            raise _failure(group_error.exceptions) from group_error
        return prefilling.result(), decoding.result()


def _failure(errors: Sequence[Exception]) -> Exception:
    """What both engines met, the first one first; that one decides whether another attempt may help."""
    if not isinstance(errors[0], AttemptFailed | KvmoverError | OutOfPages):
        return errors[0]
    # This replay's sessions end with their daemons: what would need a new one is not tried again.
    retryable = not isinstance(errors[0], OutOfPages | DaemonGone) and errors[0].retryable
    return AttemptFailed("; ".join(str(error) for error in errors), retryable=retryable)


def too_few(prefilled: Prefilled, expected_blocks: int, request: Request) -> list[str]:
    """More than expected is no error: another run, or a session that plays beside this one, may have stored it."""
    expected_hits = min(expected_blocks, request.hit_blocks_max)
    if prefilled.found_blocks < expected_blocks or prefilled.hit_blocks < expected_hits:
        return [
            f"{expected_blocks} blocks of the prompt are stored, {prefilled.found_blocks} were found "
            f"and {prefilled.hit_blocks} loaded{prefilled.first_lost}"
        ]
    return []
