"""The inference engines' own all-reduce kernels, for `allreduce` to time: found, given buffers, never asked for multicast.

    custom       what SGLang runs by default on this box: from 0.5.12 over a full NVLink mesh its kernel compiled at start,
                 else the older one
    custom-v1    the older one of sgl_kernel, which is also vLLM's
    flashinfer   TensorRT-LLM's kernel in FlashInfer, the sum alone: engines fuse a norm into it

All buffers come from cudaMalloc and are shared through CUDA IPC. SGLang's newer kernel and FlashInfer's would take them
from torch's symmetric memory, which makes NVLink multicast objects where it may: the one function of each that does so is
replaced by ours before the kernel is built, so that the same kernel runs on plain memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

MB = 2**20

# kernel -> environment of its worker processes. The engines' own probe of peer access wants their process groups; the
# values are checked here anyway.
ENGINES: dict[str, dict[str, str]] = {
    "custom": {"SGLANG_SKIP_P2P_CHECK": "1"},
    "custom-v1": {
        "SGLANG_SKIP_P2P_CHECK": "1",
        "VLLM_SKIP_P2P_CHECK": "1",
        "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0",
    },
    "flashinfer": {},
}
PACKAGES = {"custom": ("sglang",), "custom-v1": ("sglang", "vllm"), "flashinfer": ("flashinfer",)}
LIMITS = {"custom": 16 * MB, "custom-v1": 8 * MB, "flashinfer": 8 * MB}  # bytes of the kernels' shared buffers
RANKS = {"custom": tuple(range(2, 9)), "custom-v1": (2, 4, 6, 8), "flashinfer": (2, 4, 8)}
COMPILE_S = 480.0  # SGLang's newer kernel and FlashInfer's are compiled at their first use, the latter for minutes
WIDTHS = (7168, 4096, 2048, 1024, 512)  # of a row, as FlashInfer's kernel wants rows


@dataclass(frozen=True)
class Kernel:
    """A kernel ready to run. reduce(x) returns the sum, in a new buffer or in x; capture() goes around a graph's capture."""

    name: str
    reduce: Callable[[Any], Any]
    capture: Callable[[], AbstractContextManager[Any]]


def importable(name: str) -> bool:
    """Whether a package that holds the kernel is installed. Imports nothing."""
    return any(importlib.util.find_spec(package) is not None for package in PACKAGES[name])


def build(name: str, group: Any, device: Any) -> Kernel:
    """Build a kernel over the ranks of `group`, a gloo group. Every rank of it must call. Raises RuntimeError where it cannot run."""
    if not importable(name):
        raise RuntimeError(f"not installed: {' or '.join(PACKAGES[name])}")
    if name == "flashinfer":
        return _flashinfer(group, device)
    engine, label = _sglang(name, group, device) if importlib.util.find_spec("sglang") else _vllm(group, device)
    if engine.disabled:
        raise RuntimeError(
            f"{label} switched itself off: no peer access, or more than two GPUs without NVLink between all"
        )
    return Kernel(label, engine.custom_all_reduce, engine.capture)


def _sglang(name: str, group: Any, device: Any) -> tuple[Any, str]:
    from sglang.srt.distributed.device_communicators import custom_all_reduce as v1

    dispatch = getattr(v1, "dispatch_custom_allreduce", None)
    kind = v1.CustomAllreduce if name == "custom-v1" or dispatch is None else dispatch(group=group, device=device)
    if kind.__name__ == "CustomAllReduceV2":
        from sglang.srt.distributed.device_communicators import custom_all_reduce_v2 as v2

        if not hasattr(v2, "_allocate_symmetric_memory"):
            raise RuntimeError("this SGLang's kernel gets its buffers in a way not known here: it might use multicast")

        def plain(nbytes: int, device: Any, group: Any) -> tuple[Any, Any]:
            return _ipc_memory(v1.CustomAllreduce.create_shared_buffer, nbytes, device, group)

        v2._allocate_symmetric_memory = plain
    return kind(group, device), f"sglang {kind.__name__}"


def _vllm(group: Any, device: Any) -> tuple[Any, str]:
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    return CustomAllreduce(group, device), "vllm CustomAllreduce"


def _flashinfer(group: Any, device: Any) -> Kernel:
    import torch
    import torch.distributed as dist
    from flashinfer.comm import cuda_ipc, trtllm_ar

    rank, ranks = dist.get_rank(group=group), dist.get_world_size(group=group)

    def plain(nbytes: int, world: int, dtype: Any, where: Any, group_name: str) -> tuple[Any, Any, Any]:
        addresses = cuda_ipc.create_shared_buffer(nbytes, group)
        own = _view(addresses[rank], nbytes, device)
        own.zero_()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(group=group)
        return addresses, own.view(dtype), None

    if hasattr(trtllm_ar, "_alloc_symm_buffer_bytes"):
        trtllm_ar._alloc_symm_buffer_bytes = plain
    elif not hasattr(trtllm_ar, "create_shared_buffer"):
        raise RuntimeError("this FlashInfer gets its buffers in a way not known here: it might use multicast")
    width = WIDTHS[1]
    made = trtllm_ar.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        rank, ranks, LIMITS["flashinfer"] // 2 // width, width, group=group
    )

    def reduce(x: Any) -> Any:
        hidden = next(w for w in WIDTHS if x.numel() % w == 0)
        rows, out = x.view(-1, hidden), torch.empty_like(x)
        trtllm_ar.trtllm_allreduce_fusion(
            allreduce_in=rows, world_size=ranks, world_rank=rank, token_num=rows.shape[0], hidden_dim=hidden,
            workspace_ptrs=made[1], launch_with_pdl=True, trigger_completion_at_end=True, fp32_acc=False,
            pattern_code=trtllm_ar.AllReduceFusionPattern.kAllReduce, use_oneshot=None, allreduce_out=out.view_as(rows),
            residual_in=None, residual_out=None, norm_out=None, quant_out=None, scale_out=None, rms_gamma=None, rms_eps=None,
            scale_factor=None, layout_code=None,
        )  # fmt: skip
        return out

    return Kernel("flashinfer trtllm", reduce, nullcontext)


def _ipc_memory(share: Callable[..., list[int]], nbytes: int, device: Any, group: Any) -> tuple[Any, Any]:
    """nbytes on every rank, mapped into all of them: this rank's tensor, and what stands for torch's symmetric memory.

    share(nbytes, group=...) allocates and returns each rank's address in this process. A peer's buffer is given out as a
    tensor of our own device, as symmetric memory does.
    """
    import torch
    import torch.distributed as dist

    buffers = [_view(address, nbytes, device) for address in share(nbytes, group=group)]

    def get_buffer(rank: int, sizes: list[int], dtype: Any) -> Any:
        if dtype != torch.uint8 or list(sizes) != [nbytes]:
            raise RuntimeError(f"asked for {sizes} of {dtype} where {nbytes} bytes are")
        return buffers[rank]

    return buffers[dist.get_rank(group=group)], SimpleNamespace(get_buffer=get_buffer, multicast_ptr=0)


def _view(address: int, nbytes: int, device: Any) -> Any:
    import torch

    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))
