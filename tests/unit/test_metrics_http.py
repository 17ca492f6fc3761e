"""Metrics over HTTP: what Prometheus gets, and that nobody can hold more than a little of the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmoverd.adapters.observers import metrics_http
from kvmoverd.adapters.observers.metrics_http import MetricsServer
from kvmoverd.adapters.observers.scheduler_metrics import registry_of
from kvmoverd.core.errors import ConfigError
from kvmoverd.core.scheduling.counts import Counts
from kvmoverd.core.scheduling.numbers import Census, Durations, JournalNumbers, SchedulerNumbers

WAIT_S = 5.0
LABELS = ("policy", "prefill", "decode", "path", "role", "call", "le")


def numbers() -> SchedulerNumbers:
    pulls = Durations()
    for us in (40, 70, 3_500, 9_000_000):
        pulls.add(us * 1_000)
    return SchedulerNumbers(
        policy="paper",
        leads=True,
        epoch=7,
        leads_total=2,
        counts=Counts(
            submitted=10, assigned=9, done=8, requeued=1, failed=2, refused=3, by_rule={("C2", "low", "tie"): 9}
        ),
        waiting=1,
        live=4,
        census=Census({"prefill": 1, "decode": 2}, {"prefill": 8, "decode": 16}, 3, 1, 2),
        waits=5,
        streams=3,
        calls={"pull": pulls},
        journal=JournalNumbers(lines=11, bytes=12, dropped=13, waiting=14),
    )


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = MetricsServer(registry_of(numbers))
    yield await server.start("127.0.0.1", 0)
    await server.stop()


async def asked(port: int, request: str) -> tuple[str, str]:
    """Head and body."""
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request.encode())
        found = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    head, _, body = found.partition("\r\n\r\n")
    return head, body


async def test_all_numbers_are_there_by_their_names(port: int) -> None:
    head, body = await asked(port, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\nContent-Type: text/plain")
    assert f"Content-Length: {len(body.encode())}" in head
    found = {
        (
            sample.name.removeprefix("kvmoverd_scheduler_"),
            *(sample.labels[name] for name in LABELS if name in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }
    assert found["assignments_total", "paper", "C2", "low", "tie"] == 9
    assert (found["submitted_total",], found["requeued_total",], found["failed_total",]) == (10, 1, 2)
    assert (found["refused_total",], found["done_total",], found["leads_total",]) == (3, 8, 2)
    assert (found["waiting",], found["live",], found["epoch",], found["leading",]) == (1, 4, 7, 1)
    assert (found["nodes",], found["nodes_stale",], found["groups", "decode"], found["engines", "prefill"]) == (
        3,
        1,
        2,
        8,
    )
    assert found["nodes_draining",] == 2
    assert (found["ticket_waits",], found["report_streams",]) == (5, 3)
    assert (found["journal_dropped_total",], found["journal_waiting",]) == (13, 14)
    assert found["decision_seconds_bucket", "pull", "5e-05"] == 1
    assert found["decision_seconds_bucket", "pull", "0.0001"] == 2
    assert found["decision_seconds_bucket", "pull", "0.004"] == 3
    assert found["decision_seconds_count", "pull"] == found["decision_seconds_bucket", "pull", "+Inf"] == 4
    assert found["decision_seconds_sum", "pull"] == pytest.approx(9.00361)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET / HTTP/1.1", "404"),
        ("POST /metrics HTTP/1.1", "405"),
        ("GET /metrics?name=x HTTP/1.0", "200"),
        ("HEAD /metrics HTTP/1.1", "200"),
        ("\x00", "404"),
    ],
)
async def test_what_is_asked_otherwise_is_told_so(port: int, request_line: str, status: str) -> None:
    head, body = await asked(port, f"{request_line}\r\n\r\n")
    assert head.split(" ")[1] == status
    assert bool(body) is not request_line.startswith("HEAD")


async def test_a_head_without_end_is_cut(port: int) -> None:
    assert await asked(port, "GET /metrics HTTP/1.1\r\n" + "x" * metrics_http.HEAD_BYTES_MAX * 2) == ("", "")


async def test_who_asks_nothing_is_cut_and_so_many_at_once_are_refused(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_http, "ANSWER_S", 0.2)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(metrics_http.CONNECTIONS_MAX)]
    with pytest.raises((ConnectionError, AssertionError)):
        assert (await asked(port, "GET /metrics HTTP/1.1\r\n\r\n"))[0]
    async with asyncio.timeout(WAIT_S):
        for reader, writer in silent:
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
    head, _ = await asked(port, "GET /metrics HTTP/1.1\r\n\r\n")
    assert "200 OK" in head


async def test_an_address_that_is_taken_is_a_config_error(port: int) -> None:
    with pytest.raises(ConfigError, match=f"metrics.listen: can't listen at 127.0.0.1:{port}"):
        await MetricsServer(registry_of(numbers)).start("127.0.0.1", port)
