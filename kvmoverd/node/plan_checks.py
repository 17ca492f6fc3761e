"""What a prefill engine's plan must keep to, before anything is taken for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvmoverd.core.errors import BadPages, BadPlan, BadRequest, UnknownPeer
from kvmoverd.core.geometry import distinct_pages
from kvmoverd.core.shares import check_whole
from kvmoverd.core.status import Path
from kvmoverd.node.gpu_opening import check_on_host, is_on_gpu
from kvmoverd.node.prefill import Plan
from kvmoverd.node.sessions import Pages

PAGE_SETS_MAX = 64


def checked_plan(plan: Plan, *, own_node: str, knows: Callable[[str], bool], gpus_over_network: bool) -> Plan:
    """The plan as it is carried out. `knows`: is there a node of this name?

    Raises `BadRequest`, `BadPlan`, `BadPages`, `PagesBusy`, `UnknownPeer`.
    """
    _check_blocks(plan)
    _check_readers(plan, knows)
    others = {plan.decode_node, *(share.node for share in plan.shares)} - {"", own_node}
    if not gpus_over_network:
        for node in sorted(others):
            check_on_host(plan.region, node)
    if not 1 <= len(plan.page_sets) <= PAGE_SETS_MAX:
        raise BadPages(f"{len(plan.page_sets)} page sets are given, must be 1 to {PAGE_SETS_MAX}")
    for pages in plan.page_sets:
        plan.region.check(pages, plan.total_blocks)
    _check_disjoint(plan.page_sets)
    if not gpus_over_network and is_on_gpu(plan.region):
        return replace(plan, no_helpers=True)
    return plan


def _check_blocks(plan: Plan) -> None:
    if plan.total_blocks == 0:
        raise BadRequest("the prompt has neither full blocks nor a tail")
    if not 0 <= plan.tail_tokens < plan.namespace.layout.block_tokens:
        raise BadRequest(f"tail_tokens is {plan.tail_tokens}, must be 0 to {plan.namespace.layout.block_tokens - 1}")
    if plan.hit_blocks > len(plan.keys):
        raise BadRequest(f"hit_blocks is {plan.hit_blocks}, the prompt has {len(plan.keys)} full blocks")
    if plan.resident_blocks > plan.hit_blocks:
        raise BadRequest(f"resident_blocks is {plan.resident_blocks}, hit_blocks is {plan.hit_blocks}")
    if plan.resident_blocks and plan.ring_sets:
        text = f"resident_blocks is {plan.resident_blocks}, and all layers take turns in {plan.ring_sets} page sets"
        raise BadPlan(f"{text}: no block can lie there for all of them")


def _check_readers(plan: Plan, knows: Callable[[str], bool]) -> None:
    if plan.path is Path.DE and not plan.decode_node:
        raise BadPlan("PATH_DE needs a decode_node: there is nobody to read")
    if plan.shares and plan.path is not Path.PARTS:
        raise BadPlan(f"{len(plan.shares)} parts are given: they go with PATH_PARTS alone")
    if (plan.helpers or plan.no_helpers) and plan.path is not Path.AUTO:
        raise BadPlan("helpers and no_helpers go with PATH_AUTO alone: other paths say who reads")
    if plan.helpers and plan.no_helpers:
        raise BadPlan(f"no_helpers is true, and {len(plan.helpers)} helpers are named")
    if plan.path is Path.PARTS:
        check_whole(plan.shares, plan.loaded)
    for node in (*(share.node for share in plan.shares), *plan.helpers):
        if not knows(node):
            raise UnknownPeer(f"no node is named {node!r}", node=node)


def _check_disjoint(page_sets: Sequence[Pages]) -> None:
    total = sum(len(pages) for pages in page_sets)
    distinct = distinct_pages(np.concatenate(page_sets))
    if distinct != total:
        raise BadPages(f"{total - distinct} pages are in more than one page set")
