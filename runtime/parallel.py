"""Several processes, one run: `torchrun --nproc_per_node=N train.py CONFIG`, one device for each process.

The processes split the sequences of one global batch, so the batch of a step, its order and its loss do not
depend on their number. With `train.parallel = "ddp"` each process holds the whole model; with "fsdp" each
holds a shard of the weights, gradients and moments, for models that are too large for one device. Rank 0
writes the run's folder. Checkpoints hold whole tensors: any number of processes can resume from them.
`torchrun ... eval.py RUN` distributes the windows: each process holds the whole model, computes its part of
the forward passes, and gathers the losses of the others.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import Config, TrainConfig
from model import GPT
from runtime.device import pick_device
from runtime.errors import UserError, shortened

EVALUATION_TIMEOUT = timedelta(days=1)  # a forward pass may take long; a dead process is noticed at once


class Process(NamedTuple):
    """One process of a run: its device, its rank, and the number of processes."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    def shard(self, batch: Tensor) -> Tensor:
        """Rows rank, rank + world_size, ... of a global batch (B, ...). -> (B / world_size, ...)."""
        return batch[self.rank::self.world_size]


def torchrun_ranks() -> tuple[int, int, int]:
    """Rank, rank on this machine, and world size, from torchrun's environment; 0, 0, 1 without torchrun.

    Raises UserError if only a part of it is set.
    """
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE"
    if "LOCAL_RANK" not in os.environ:
        return 0, 0, 1
    values = [os.environ.get(name, "") for name in names]
    if not all(re.fullmatch("[0-9]{1,9}", value) for value in values) or not max(
            map(int, values[:2])) < int(values[2]):
        raise UserError(f"environment: {', '.join(names)} are {', '.join(map(shortened, values))}, which no "
                        "torchrun sets; start by torchrun, or unset LOCAL_RANK to train with one process")
    rank, local_rank, world_size = map(int, values)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if world_size > 1 and missing:
        raise UserError(f"environment: WORLD_SIZE is {world_size} without {missing[0]}; start by torchrun")
    return rank, local_rank, world_size


def start(t: TrainConfig) -> Process:
    """Join torchrun's other processes, if any. Raises UserError if the batch cannot be divided among them."""
    device, (rank, local_rank, world_size) = pick_device(t), torchrun_ranks()
    if world_size == 1:
        return Process(device)
    if t.batch_size % (world_size * t.accumulate):
        raise UserError(f"train.batch_size {t.batch_size}: must be a multiple of {world_size} processes "
                        f"times train.accumulate = {t.accumulate}; change one of the three")
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"torchrun --nproc_per_node: more processes than the {torch.cuda.device_count()} "
                            "GPUs of this machine; start one for each GPU")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # with GPUs, gloo too: the CPUs exchange signals, so that none waits for its GPU
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    silence_unless_first(rank)
    return Process(device, rank, world_size)


def start_evaluation() -> Process:
    """Join torchrun's other processes, if any; "cuda" then means a GPU for each process.

    Results are exchanged between CPUs, wherever the model is: losses are small, and when a process ends, gloo
    reports it to the others at once.
    """
    rank, local_rank, world_size = torchrun_ranks()
    if world_size > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        dist.init_process_group("gloo", timeout=EVALUATION_TIMEOUT)
        silence_unless_first(rank)
    return Process(torch.device("cpu"), rank, world_size)


def silence_unless_first(rank: int) -> None:
    """Only rank 0 prints: discard the standard output of the others; their errors still appear."""
    if rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parallelize(model: GPT, config: Config, process: Process) -> nn.Module:
    """The model to train, on its device: unchanged, wrapped in DDP, or sharded in place by FSDP2."""
    if process.world_size == 1:
        return model.to(process.device)
    # imported here because they take half a second, which a single process need not spend
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if config.train.parallel == "ddp":
        model.to(process.device)
        # what is not in all layers, or is dropped, may have weights that get no gradient
        is_partial = config.position.drop_at < 1 or len(set(model.encodings)) > 1 or (
            config.position.temperature_layers != "all")
        return DistributedDataParallel(model, [process.device] if process.device.type == "cuda" else None,
                                       find_unused_parameters=is_partial)
    mesh = init_device_mesh(process.device.type, (process.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)               # embedding, head, encoding: one group around the blocks
    return model


def sync_gradients(model: Any, is_on: bool) -> None:
    """Whether the next backward pass averages gradients over processes: only the last of a batch must."""
    model = getattr(model, "_orig_mod", model)                          # torch.compile's wrapper
    if hasattr(model, "require_backward_grad_sync"):                    # DDP; its no_sync() sets this
        model.require_backward_grad_sync = is_on
    elif hasattr(model, "set_requires_gradient_sync"):                  # FSDP2
        model.set_requires_gradient_sync(is_on)


def all_gather(process: Process, *values: Tensor) -> Tensor:
    """The n scalars of all processes, (world_size, n), in fp64 on the device. Does not wait for a GPU."""
    gathered = torch.zeros(process.world_size, len(values), dtype=torch.float64, device=process.device)
    for i, value in enumerate(values):
        gathered[process.rank, i] = value
    return all_reduce(process, gathered)


def all_reduce(process: Process, values: Tensor) -> Tensor:
    """Element-wise sum over processes, in place; exact if all processes except one hold 0."""
    if process.world_size > 1:
        dist.all_reduce(values)
    return values


def any_signal(process: Process, stop: Sequence[int]) -> int:
    """The number of a signal that any process received (the first in its `stop`), else 0.

    Processes exchange it between CPUs, so that none waits for the work that its GPU has queued.
    """
    number = stop[0] if stop else 0
    if process.world_size == 1:
        return number
    largest = torch.tensor(number)
    with errors_of_others():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


@contextmanager
def errors_of_others() -> Iterator[None]:
    """Raise UserError if another process has ended."""
    try:
        yield
    except RuntimeError as error:       # what gloo raises for a closed connection
        raise UserError("another process of torchrun has ended; fix what its error line says, then start all "
                        "of them again") from error


def round_robin(process: Process, work: Sequence[Any], do: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield do(piece) for each piece of work, in order, on every process; each computes a share of it.

    Raises UserError if another process has ended.
    """
    for first in range(0, len(work), process.world_size):
        turn = first + process.rank
        own = [do(piece) for piece in work[turn:turn + 1]]              # one result, or none at the end
        yield from (result for results in all_gather_objects(process, own) for result in results)


def all_gather_objects(process: Process, own: Any) -> list[Any]:
    """The objects of all processes, in the order of their ranks. Raises UserError if one has ended."""
    if process.world_size == 1:
        return [own]
    gathered: list[Any] = [None] * process.world_size
    with errors_of_others():
        dist.all_gather_object(gathered, own)
    return gathered


def require_agreement(process: Process, own: dict[str, Any]) -> None:
    """Raise UserError unless these values are the same in all processes; they are compared as text."""
    texts = all_gather_objects(process, {key: str(value) for key, value in own.items()})
    for key, (rank, other) in itertools.product(own, enumerate(texts)):
        lines = itertools.zip_longest(texts[0][key].splitlines(), other[key].splitlines(), fillvalue="")
        for first, line in lines:
            if line != first:
                raise UserError(f"torchrun: processes 0 and {rank} have different {key}: {shortened(first)} "
                                f"and {shortened(line)}; start all with the same files and arguments")


def barrier(process: Process) -> None:
    """Wait until every process is here."""
    any_signal(process, ())


def unshard(tensor: Any) -> Tensor:
    """The whole tensor, on every process: gathered if FSDP2 shards it, else the tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_like(tensor: Tensor, parameter: Any) -> Tensor:
    """Shard a tensor that every process holds whole as the parameter is sharded; unchanged if it is not."""
    if not hasattr(parameter, "full_tensor") or tensor.shape != parameter.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements,
                             src_data_rank=None)
