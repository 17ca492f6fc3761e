"""The quota on attention time within an engine: FLOPs, the fitted curve, who goes into a forward pass and who is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvmover_client import BadRequest
from kvmover_client.quota import (
    QUOTA_S,
    SAMPLES_MAX,
    Attention,
    AttentionQuota,
    BadSamples,
    Batch,
    Curve,
    Sample,
    Work,
    fit,
)

PAIRS = Attention(flops_per_pair=1)
SECOND_A_PAIR = Curve(0.0, 0.0, 1.0)


def quota(quota_s: float, *, layers: int = 1, scope: str = "forward") -> AttentionQuota:
    """In which a pair of a query and a key takes a second in each layer."""
    return AttentionQuota(PAIRS, SECOND_A_PAIR, layers, quota_s, scope)  # type: ignore[arg-type]


def test_the_flops_are_those_of_each_new_token_with_each_key_before_it_and_itself() -> None:
    assert PAIRS.flops(0, 1) == 1
    assert PAIRS.flops(100, 50) == sum(100 + i for i in range(1, 51))
    assert Attention(flops_per_pair=2 * 128 * 960).flops(0, 2) == 3 * 2 * 128 * 960


@pytest.mark.parametrize(("cached", "bsz"), [(0, 5), (0, 30), (8, 4), (9, 1), (10, 7), (50, 3), (3, 7)])
def test_sparse_attention_looks_at_no_more_keys_than_it_chooses(cached: int, bsz: int) -> None:
    looked_at = sum(min(cached + i, 10) for i in range(1, bsz + 1))
    every = sum(cached + i for i in range(1, bsz + 1))
    assert Attention(flops_per_pair=3, keys_max=10).flops(cached, bsz) == 3 * looked_at
    assert Attention(3, keys_max=10, index_flops_per_pair=0.5).flops(cached, bsz) == 3 * looked_at + 0.5 * every


def test_a_curve_is_found_again_from_its_own_samples() -> None:
    true = Curve(3e-5, 2e-11, 1 / 4e14)
    found = fit([Sample(flops, true.seconds(flops)) for flops in np.geomspace(1e8, 1e13, 40)])
    for flops in (1e8, 3e10, 1e13, 1e14):
        assert found.seconds(flops) == pytest.approx(true.seconds(flops), rel=1e-3)
    assert found.miss < 1e-6


def test_noise_moves_the_curve_little_and_a_tenth_of_wild_samples_hardly() -> None:
    chance = np.random.default_rng(5)
    true = Curve(3e-5, 0.0, 1 / 4e14)
    flops = np.geomspace(1e9, 1e13, 200)
    seconds = np.array([true.seconds(each) for each in flops]) * chance.lognormal(0.0, 0.05, 200)
    seconds[::10] *= 20
    found = fit([Sample(float(f), float(s)) for f, s in zip(flops, seconds, strict=True)])
    plain = np.polyfit(flops, seconds, 1)
    for at in (1e10, 1e12, 1e13):
        assert found.seconds(at) == pytest.approx(true.seconds(at), rel=0.06)
        assert abs(np.polyval(plain, at) / true.seconds(at) - 1) > 0.5


def test_the_curve_never_falls() -> None:
    samples = [
        Sample(flops, seconds)
        for flops, seconds in ((1e9, 4e-5), (1e10, 3e-5), (1e11, 5e-5), (1e12, 9e-5), (1e13, 2e-4))
    ]
    found = fit(samples)
    grid = [found.seconds(flops) for flops in np.geomspace(1e6, 1e15, 60)]
    assert grid == sorted(grid) and grid[0] > 0
    assert found.seconds(0) == 0


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([Sample(1e9, 1.0)] * 3, "3 samples: 4 to 100000"),
        ([Sample(1e9, 1.0)] * (SAMPLES_MAX + 1), "100001 samples"),
        ([Sample(1e9, 1.0), Sample(1e10, 2.0), Sample(-1.0, 1.0), Sample(1.0, 1.0)], "sample 2: -1.0 FLOPs in 1.0 s"),
        ([Sample(1e9, 1.0), Sample(1e10, math.nan), Sample(1e10, 1.0), Sample(1.0, 1.0)], "sample 1: .* in nan s"),
        ([Sample(1e9, math.inf)] * 4, "in inf s"),
        ([Sample(1e9, 0.0)] * 4, "in 0.0 s"),
        ([Sample(1e9, 1.0), Sample(1.5e9, 2.0)] * 2, "a spread of 1.50: at least 2.0"),
        ([Sample(10.0**n, 1e-4) for n in range(8, 13)], "do not grow with FLOPs: 1e.08 to 1e.12 FLOPs take 0.0001 s"),
        ([Sample(10.0**n, 10.0 ** (-n)) for n in range(8, 13)], "do not grow|are off the curve"),
        (
            [Sample(10.0**n, 10.0 ** (n % 2 - 3)) for n in range(8, 16)],
            "are off the curve by more than .*%, 25% may be",
        ),
    ],
)
def test_bad_samples_are_refused_with_numbers(samples: list[Sample], said: str) -> None:
    with pytest.raises(BadSamples, match=said) as caught:
        fit(samples)
    assert caught.value.reason == "BAD_SAMPLES" and isinstance(caught.value, BadRequest)


def test_requests_go_in_their_order_while_the_sum_fits() -> None:
    waiting = [Work(9, 1), Work(19, 1), Work(29, 1)]
    assert quota(60).admit(waiting) == Batch(tuple(waiting), None, 60.0)
    assert quota(59).admit(waiting).taken == (Work(9, 1), Work(19, 1))
    assert quota(29).admit(waiting).taken == (Work(9, 1),)


def test_nobody_overtakes_one_that_does_not_fit() -> None:
    assert quota(20).admit([Work(9, 1), Work(99, 1), Work(0, 1)]).taken == (Work(9, 1),)


def test_the_first_that_does_not_fit_whole_is_cut_to_the_most_that_does() -> None:
    batch = quota(10 + 33).admit([Work(9, 1), Work(10, 50), Work(0, 1)])
    # 11 + 12 = 23 fit, 11 + 12 + 13 = 36 do not.
    assert batch.taken == (Work(9, 1), Work(10, 2)) and batch.rest == Work(12, 48)
    assert batch.attention_s == 33.0 and not batch.over_quota


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_is_the_largest_that_fits_and_all_chunks_make_the_whole(seed: int) -> None:
    chance = np.random.default_rng(seed)
    limit = quota(float(chance.integers(2_000, 50_000)))
    todo = [Work(int(chance.integers(0, 900)), int(chance.integers(1, 300))) for _ in range(12)]
    want, done = [work.cached + work.bsz for work in todo], []
    while todo:
        batch = limit.admit(todo)
        assert batch.taken and batch.attention_s <= limit.quota_s
        flops = sum(PAIRS.flops(work.cached, work.bsz) for work in batch.taken)
        assert batch.attention_s == limit.seconds(flops)
        if batch.rest is not None:
            last = batch.taken[-1]
            one_more = flops - PAIRS.flops(last.cached, last.bsz) + PAIRS.flops(last.cached, last.bsz + 1)
            assert limit.seconds(one_more) > limit.quota_s
            assert batch.rest.cached == last.cached + last.bsz
        finished = len(batch.taken) - (batch.rest is not None)
        done += [work.cached + work.bsz for work in batch.taken[:finished]]
        todo = ([batch.rest] if batch.rest else []) + todo[len(batch.taken) :]
    assert done == want


def test_an_engine_gets_on_even_when_one_token_is_more_than_the_quota() -> None:
    batch = quota(5).admit([Work(100, 3), Work(0, 1)])
    assert batch == Batch((Work(100, 1),), Work(101, 2), 101.0, over_quota=True)
    assert quota(5).admit([Work(100, 1)]) == Batch((Work(100, 1),), None, 101.0, over_quota=True)


def test_an_empty_queue_is_an_empty_batch() -> None:
    assert quota(5).admit([]) == Batch((), None, 0.0)


def test_the_scope_says_whether_the_quota_is_for_a_layer_or_for_all_of_them() -> None:
    waiting = [Work(9, 1), Work(9, 1), Work(9, 1), Work(9, 1)]
    assert len(quota(20, layers=2, scope="layer").admit(waiting).taken) == 2
    assert len(quota(20, layers=2, scope="forward").admit(waiting).taken) == 1
    assert quota(20, layers=2, scope="forward").admit(waiting).attention_s == 20.0


def test_the_default_quota_is_300_ms_of_a_forward_pass() -> None:
    limit = AttentionQuota(PAIRS, SECOND_A_PAIR, layers=61)
    assert (limit.quota_s, limit.scope) == (QUOTA_S, "forward") == (0.3, "forward")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Work(-1, 1),
        lambda: Work(0, 0),
        lambda: Work(1 << 40, 1),
        lambda: Attention(0),
        lambda: Attention(1, keys_max=0),
        lambda: Attention(math.nan),
        lambda: Attention(1, index_flops_per_pair=-1),
        lambda: Curve(1.0, 0.0, 0.0),
        lambda: Curve(0.0, -1.0, 1.0),
        lambda: quota(0),
        lambda: quota(1, layers=0),
        lambda: quota(1, scope="day"),
    ],
)
def test_numbers_out_of_bounds_are_refused(make: object) -> None:
    with pytest.raises(BadRequest, match=r"\d|day"):
        make()  # type: ignore[operator]
