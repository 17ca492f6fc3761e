"""Region memory: its seals, where pages lie in it, and that the daemon's own checks accept what the client lays out."""

from __future__ import annotations

import fcntl
import os

import numpy as np
import pytest

from kvmover_client import BadPages, BadRegion, Geometry, Layout, Region, RegionMemory, paged_geometry, ring_geometry
from kvmoverd.core.geometry import RegionGeometry
from kvmoverd.core.geometry import Segment as DaemonSegment
from kvmoverd.core.layout import Layout as DaemonLayout

V32 = Layout.uniform(layers=61, tokens=64, token_bytes=656)
K_AND_V = Layout(16, ((4096, 4096), (8192, 1024), (160, 16)))


def as_daemon_sees_it(layout: Layout, geometry: Geometry) -> RegionGeometry:
    layers = tuple(
        tuple(DaemonSegment(run.base_bytes, run.page_stride_bytes, run.page_bytes, run.pages) for run in runs)
        for runs in geometry.layers
    )
    return RegionGeometry(DaemonLayout(layout.block_tokens, layout.layers), geometry.size_bytes, layers)


def test_the_file_can_neither_grow_nor_shrink_nor_lose_its_seals() -> None:
    with RegionMemory.create(10_000, "kv") as memory:
        seals = fcntl.fcntl(memory.fileno(), fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        for size in (5_000, 20_000):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fileno(), size)
        assert os.fstat(memory.fileno()).st_size == 10_000
        assert not os.get_inheritable(memory.fileno())


def test_views_write_the_file_that_others_map() -> None:
    with RegionMemory.create(4096 + 3, "kv") as memory:
        memory.array()[:4] = [1, 2, 3, 4]
        assert os.pread(memory.fileno(), 4, 0) == bytes([1, 2, 3, 4])
        assert memory.array(np.uint32)[0] == 0x04030201
        assert len(memory.array()) == 4099 and len(memory.array(np.uint32)) == 1024


def test_closing_gives_the_file_back_and_leaves_living_views_alone() -> None:
    memory = RegionMemory.create(4096, "kv")
    fd, view = memory.fileno(), memory.array()
    view[0] = 7
    memory.close()
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert view[0] == 7
    for use in (memory.array, memory.fileno):
        with pytest.raises(ValueError, match="'kv' is closed"):
            use()


def test_memory_of_no_bytes_is_refused() -> None:
    with pytest.raises(BadRegion, match="0 bytes"):
        RegionMemory.create(0, "kv")


@pytest.mark.parametrize("layout", [V32, K_AND_V], ids=["V3.2", "K and V"])
@pytest.mark.parametrize("pages_per_block", [1, 4, 16])
def test_the_daemon_accepts_paged_geometries(layout: Layout, pages_per_block: int) -> None:
    geometry = paged_geometry(layout, 12, pages_per_block)
    seen = as_daemon_sees_it(layout, geometry)
    assert (seen.pages, seen.pages_per_block, seen.is_ring) == (12, pages_per_block, False)


def test_the_daemon_accepts_a_ring() -> None:
    geometry = ring_geometry(V32, 6, 2)
    seen = as_daemon_sees_it(V32, geometry)
    assert (seen.pages, seen.pages_per_block, seen.is_ring) == (6, 2, True)
    assert geometry.page_span(60, 0, 1) == geometry.page_span(0, 0, 1) == slice(20_992, 41_984)


def test_pages_of_all_layers_and_segments_share_no_byte() -> None:
    geometry = paged_geometry(K_AND_V, 5, 2)
    written = np.zeros(geometry.size_bytes, dtype=np.uint8)
    for layer, segments in enumerate(K_AND_V.layers):
        for segment, segment_bytes in enumerate(segments):
            for page in range(5):
                span = geometry.page_span(layer, segment, page)
                assert span.stop - span.start == segment_bytes // 2
                written[span] += 1
    assert written.max() == 1 and written.sum() == 5 * K_AND_V.block_bytes // 2


def test_a_registered_region_shows_its_pages() -> None:
    geometry = paged_geometry(K_AND_V, 3)
    with RegionMemory.create(geometry.size_bytes, "kv") as memory:
        region = Region(1, 3, 1, memory, geometry)
        region.page_view(2, 1, 0)[:] = 9
        assert len(region.page_view(2, 1, 0)) == 16
        assert int(memory.array().sum()) == 16 * 9
        for page in (-1, 3):
            with pytest.raises(BadPages, match=f"page {page} is out of bounds, the segment has 3"):
                region.page_view(2, 1, page)


@pytest.mark.parametrize(
    ("pages", "pages_per_block", "said"),
    [
        (0, 1, "0 pages, 1 a block"),
        (4, 0, "4 pages, 0 a block"),
        (4, 3, "must divide 16 tokens"),
        (4, 32, "must divide"),
    ],
)
def test_geometries_that_can_not_be_are_refused(pages: int, pages_per_block: int, said: str) -> None:
    with pytest.raises(BadRegion, match=said):
        paged_geometry(K_AND_V, pages, pages_per_block)


def test_blocks_that_can_not_be_cut_and_rings_of_unequal_layers_are_refused() -> None:
    with pytest.raises(BadRegion, match="layer 0: 6 bytes can't be cut into 4 pages"):
        paged_geometry(Layout(4, ((6,),)), 4, 4)
    with pytest.raises(BadRegion, match="a ring needs equal layers, the layout has 3 kinds"):
        ring_geometry(K_AND_V, 4)
