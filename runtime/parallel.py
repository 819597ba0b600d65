"""Several processes, one run: `torchrun --nproc_per_node=N train.py CONFIG`, one device for each process.

The processes split the sequences of one global batch, so the batch of a step, its order and its loss do not
depend on their number. Rank 0 writes the run's folder. Checkpoints hold whole tensors, from which any number
of processes can resume.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from base.errors import UserError
from config import Config, TrainConfig
from model import GPT
from runtime.device import pick_device, pick_dtype


class Process(NamedTuple):
    """One process of a run: its device, its rank, and the number of processes."""

    device: torch.device
    rank: int = 0
    world_size: int = 1


def start(t: TrainConfig) -> Process:
    """Join torchrun's other processes, each with a GPU of its own if there are any. Only rank 0 prints.

    Raises UserError if the batch cannot be divided among them, or for float16 under FSDP.
    """
    device = pick_device(t.device)
    world_size = int(os.environ["WORLD_SIZE"]) if "LOCAL_RANK" in os.environ else 1    # torchrun sets both
    if t.batch_size % (world_size * t.accumulate):
        raise UserError(f"train.batch_size {t.batch_size}: must be a multiple of {world_size} processes "
                        f"times train.accumulate = {t.accumulate}; change one of the three")
    # for one process too, which shards nothing: --dry-run refuses what several would
    if t.parallel == "fsdp" and pick_dtype(t.dtype, device) == torch.float16:
        raise UserError(f"train.dtype {t.dtype}: is float16 here, whose loss is not scaled under "
                        "train.parallel = fsdp; use bfloat16 or ddp")
    if world_size == 1:
        return Process(device)
    rank = int(os.environ["RANK"])
    backend = "gloo"
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
        # gloo too: the CPUs exchange signals and sums, so that none waits for its GPU
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend)
    if rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Process(device, rank, world_size)


def parallelize(model: GPT, config: Config, process: Process) -> nn.Module:
    """The model to train, on its device: wrapped in DDP, or sharded in place by FSDP2."""
    # imported here because they take half a second, which a single process need not spend
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if config.train.parallel == "ddp":
        # what is not in all layers, or is dropped, may have weights that get no gradient
        p = config.position
        is_partial = p.drop_at < 1 or p.skip_every > 0 or not (p.layers == p.temperature_layers == "all")
        return DistributedDataParallel(model.to(process.device), find_unused_parameters=is_partial)
    mesh = init_device_mesh(process.device.type, (process.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)               # embedding, head, encoding: one group around the blocks
    return model


def sync_gradients(model: Any, is_on: bool) -> None:
    """Whether the next backward pass averages gradients over processes: only the last of a batch must."""
    model = getattr(model, "_orig_mod", model)                          # torch.compile's wrapper
    if hasattr(model, "set_requires_gradient_sync"):                    # FSDP2
        model.set_requires_gradient_sync(is_on)
    else:                                                               # DDP; its no_sync() sets this
        model.require_backward_grad_sync = is_on


def mean_metrics(process: Process, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean over processes of each metric, a scalar on the device. Does not wait for a GPU."""
    sums = all_reduce(process, torch.stack([unshard(x) for x in metrics.values()]))
    return dict(zip(metrics, sums / process.world_size, strict=True))


def all_reduce(process: Process, values: Tensor) -> Tensor:
    """Element-wise sum over processes, in place; exact if all processes except one hold 0."""
    if process.world_size > 1:
        dist.all_reduce(values)
    return values


def any_signal(number: int) -> int:
    """The largest number of the processes: that of a signal which any of them received, else 0.

    Processes exchange it between CPUs, so that none waits for the work that its GPU has queued.
    """
    largest = torch.tensor(number)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def wait_for_all() -> None:
    """Wait until every process is here."""
    any_signal(0)


def require_agreement(process: Process, values: dict[str, Any]) -> None:
    """Raise UserError unless these values are the same in all processes; they are compared as text."""
    texts: list[Any] = [None] * process.world_size
    dist.all_gather_object(texts, {key: str(value) for key, value in values.items()})
    for rank, text in enumerate(texts):
        different = [key for key in values if text[key] != texts[0][key]]
        if different:
            raise UserError(f"torchrun: processes 0 and {rank} have different {' and '.join(different)}; "
                            "start all with the same files and arguments")


def unshard(tensor: Any) -> Tensor:
    """The whole tensor, on every process: gathered if FSDP2 shards it, else the tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_like(tensor: Tensor, parameter: Any) -> Tensor:
    """Shard a tensor that every process holds whole as the parameter is sharded; unchanged if it is not.

    A tensor of another shape is unchanged too: AdamW's `step`, or a wrong weight, which loading refuses.
    """
    if not hasattr(parameter, "full_tensor") or tensor.shape != parameter.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements,
                             src_data_rank=None)
