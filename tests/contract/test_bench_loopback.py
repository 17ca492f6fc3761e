"""The bench of the three ways to a GPU runs over a library of CUDA's calls, and says what is missing elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cuda_kit import NEWEST, WITHOUT_BATCH, Shim, compile_shim

from tests.bench import loopback


@pytest.mark.parametrize("version", [NEWEST, WITHOUT_BATCH])
def test_figures_of_the_sides_that_can_be_had_and_nulls_with_a_reason_for_the_others(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_SHIM_DIR", str(tmp_path))
    monkeypatch.setattr(loopback, "list_ports", list)
    shim = Shim(compile_shim(tmp_path, version), version, tmp_path)
    shim.reset()
    found, missing = loopback.run(shim.library(), rounds=3, blocks=4)
    figures = loopback.report(found, missing, 4)
    assert figures["each_to_gpu_us_per_layer"] > figures["each_to_gpu_submit_us"] > 0
    assert (figures["batch_from_gpu_us_per_layer"] is None) is (version == WITHOUT_BATCH)
    assert figures["loopback_to_gpu_us_per_layer"] is None
    assert "loopback: no RDMA device with an active port" in missing
    assert any("cudaMemcpyBatchAsync" in why for why in missing) is (version == WITHOUT_BATCH)
    assert len(figures["each_from_gpu_runs"]) == 3 and shim.count("pinned") == 0
    assert "each      to_gpu" in loopback.words(figures)


def test_without_a_gpu_all_is_null_and_that_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["loopback", "--json"])
    monkeypatch.setattr(loopback, "load_cuda", _no_cuda)
    assert loopback.main() == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["batch_to_gpu_us_per_layer"] is None and figures["missing"] == ["a GPU: none here"]


def _no_cuda() -> None:
    raise loopback.NoCuda("none here")
