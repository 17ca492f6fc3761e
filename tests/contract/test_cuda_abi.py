"""What the daemon believes of CUDA's structures, numbers and signatures is what NVIDIA's own headers say, where there are any."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from glob import glob
from pathlib import Path

import pytest

from kvmoverd.adapters.memory import cuda_library as cuda

HEADERS = sorted(glob("/usr/local/cuda*/include/cuda_runtime_api.h"))
COMPILER = shutil.which("cc") or shutil.which("gcc")

CHECKS = f"""
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stddef.h>
#define SAME(ours, theirs) _Static_assert((ours) == (theirs), #theirs)
SAME({ctypes.sizeof(cuda.IpcHandle)}, sizeof(cudaIpcMemHandle_t));
SAME({cuda.HANDLE_BYTES}, sizeof(cudaIpcMemHandle_t));
_Static_assert({ctypes.sizeof(cuda.PointerAttributes)} >= sizeof(struct cudaPointerAttributes), "room for attributes");
SAME({cuda.PointerAttributes.device.offset}, offsetof(struct cudaPointerAttributes, device));
SAME({cuda.DEVICE_MEMORY}, cudaMemoryTypeDevice);
SAME({cuda.NOT_READY}, cudaErrorNotReady);
SAME({cuda.ALREADY_PINNED}, cudaErrorHostMemoryAlreadyRegistered);
SAME({cuda._ENABLE_PEER_ACCESS}, cudaIpcMemLazyEnablePeerAccess);
SAME({cuda._COPY_DEFAULT}, cudaMemcpyDefault);
SAME({cuda._NON_BLOCKING_STREAM}, cudaStreamNonBlocking);
SAME({cuda._EVENT_WITHOUT_TIMING}, cudaEventDisableTiming);
SAME({cuda._PIN_PORTABLE}, cudaHostRegisterPortable);
SAME({cuda._DMABUF_SUPPORTED}, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);
SAME({cuda._WRITES_ORDERING}, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
SAME({cuda._ORDERED_FOR_OWNER}, CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER);
SAME({cuda._DMABUF}, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD);
cudaError_t (*opened)(void **, cudaIpcMemHandle_t, unsigned) = cudaIpcOpenMemHandle;
cudaError_t (*copied)(void *, const void *, size_t, enum cudaMemcpyKind, cudaStream_t) = cudaMemcpyAsync;
cudaError_t (*pinned)(void *, size_t, unsigned) = cudaHostRegister;
CUresult (*exported)(void *, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long) = cuMemGetHandleForAddressRange;
CUresult (*found)(CUdeviceptr *, size_t *, CUdeviceptr) = cuMemGetAddressRange_v2;
CUresult (*shared)(CUipcMemHandle *, CUdeviceptr) = cuIpcGetMemHandle;
CUresult (*asked)(void *, CUpointer_attribute, CUdeviceptr) = cuPointerGetAttribute;
#if CUDART_VERSION >= {cuda.BATCH_SINCE}
SAME({ctypes.sizeof(cuda.CopyAttributes)}, sizeof(struct cudaMemcpyAttributes));
SAME({cuda.CopyAttributes.hints.offset}, offsetof(struct cudaMemcpyAttributes, srcLocHint));
SAME({cuda.CopyAttributes.flags.offset}, offsetof(struct cudaMemcpyAttributes, flags));
SAME({cuda._STREAM_ORDER}, cudaMemcpySrcAccessOrderStream);
#if CUDART_VERSION >= {cuda.BATCH_WITHOUT_FAILED_SINCE}
cudaError_t (*batch)(void *const *, const void *const *, const size_t *, size_t, struct cudaMemcpyAttributes *, size_t *,
                     size_t, cudaStream_t) = cudaMemcpyBatchAsync;
#else
cudaError_t (*batch)(void **, void **, size_t *, size_t, struct cudaMemcpyAttributes *, size_t *, size_t, size_t *,
                     cudaStream_t) = cudaMemcpyBatchAsync;
#endif
#endif
"""


@pytest.mark.skipif(
    not HEADERS or COMPILER is None, reason="needs CUDA's headers in /usr/local/cuda*, and a C compiler"
)
def test_structures_numbers_and_signatures_are_those_of_the_headers(tmp_path: Path) -> None:
    source = tmp_path / "abi.c"
    source.write_text(CHECKS)
    for header in HEADERS:
        command = [COMPILER or "cc", "-std=c11", "-Werror", "-fsyntax-only", f"-I{Path(header).parent}", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{header}:\n{done.stderr}"


@pytest.mark.skipif(not HEADERS, reason="needs a CUDA runtime in /usr/local/cuda*")
def test_a_real_runtime_has_every_call_of_the_table() -> None:
    for path in (path for path in cuda.runtime_candidates() if path.startswith("/")):
        calls = ctypes.CDLL(path)
        assert [name for name in (*cuda._RUNTIME_CALLS, "cudaGetErrorString") if not hasattr(calls, name)] == []
