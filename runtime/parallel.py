"""Several processes, one run: `torchrun --nproc_per_node=N train.py CONFIG`, each on a device of its own.

The batch of a step, its order and its loss are the same whatever their number: they share out the sequences
of one global batch. With `train.parallel = "ddp"` each holds the whole model; with "fsdp" a share of weights,
gradients and moments, for models that one device cannot hold. Process 0 writes the run's folder; checkpoints
hold whole tensors, so that any number of processes goes on from them. `torchrun ... eval.py RUN` shares the
windows out: each process holds the whole model, takes its turns at the forwards, and gets the others' losses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import TrainConfig
from model import GPT, pick_device
from runtime.errors import UserError

PATIENCE = timedelta(days=1)    # of an evaluation with a process whose forward takes long; a dead one is seen


class World(NamedTuple):
    """Place of this process among those of the run."""

    device: torch.device
    rank: int = 0
    size: int = 1

    def share(self, batch: Tensor) -> Tensor:
        """Rows of a global batch (B, ...) for this process: every size-th. -> (B / size, ...)."""
        return batch[self.rank::self.size]


def place() -> tuple[int, int, int]:
    """Rank, rank on this machine, and number of processes, as torchrun tells them; 0, 0, 1 without it."""
    if "LOCAL_RANK" not in os.environ:
        return 0, 0, 1
    return int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])


def join(t: TrainConfig) -> World:
    """Meet the others that torchrun started, if any. Raises UserError for a batch that does not divide."""
    device, (rank, local_rank, size) = pick_device(t), place()
    if size == 1:
        return World(device)
    if t.batch_size % (size * t.accumulate):
        raise UserError(f"train.batch_size {t.batch_size}: must be a multiple of {size} processes times "
                        f"train.accumulate = {t.accumulate}; make it so")
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"torchrun --nproc_per_node: more processes than the {torch.cuda.device_count()} "
                            "GPUs of this machine; start as many as there are")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    let_first_speak(rank)
    return World(device, rank, size)


def join_to_evaluate() -> World:
    """Meet the others that torchrun started, if any; "cuda" is then a GPU of this process' own.

    Results are exchanged on the CPU, whatever the model is on: losses are small, and where a process ends,
    gloo tells the others at once.
    """
    rank, local_rank, size = place()
    if size > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        dist.init_process_group("gloo", timeout=PATIENCE)
        let_first_speak(rank)
    return World(torch.device("cpu"), rank, size)


def let_first_speak(rank: int) -> None:
    """Process 0 speaks for all: what others print is dropped, but for errors."""
    if rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def spread(model: GPT, t: TrainConfig, world: World) -> nn.Module:
    """The model to train with: itself; or DDP around it; or, sharded in place by FSDP2, itself."""
    if world.size == 1:
        return model.to(world.device)
    # here, for they take half a second that a single process need not spend
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if t.parallel == "ddp":
        model.to(world.device)
        # an encoding that is not in all layers may have weights for the others, which get no gradient
        is_partial = len(model.encoded_layers) < len(model.blocks)
        return DistributedDataParallel(model, [world.device] if world.device.type == "cuda" else None,
                                       find_unused_parameters=is_partial)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)               # embedding, head, encoding: one group around the blocks
    return model


def sync_gradients(model: Any, is_on: bool) -> None:
    """Whether the coming backward pass averages over processes: only the last of an accumulation need."""
    model = getattr(model, "_orig_mod", model)                          # torch.compile's wrapper
    if hasattr(model, "require_backward_grad_sync"):                    # DDP; its no_sync() sets this
        model.require_backward_grad_sync = is_on
    elif hasattr(model, "set_requires_gradient_sync"):                  # FSDP2
        model.set_requires_gradient_sync(is_on)


def tell(world: World, *figures: Tensor | float) -> Tensor:
    """What each process has to say, (processes, figures), on the device, in fp64; nothing waits for it."""
    said = torch.zeros(world.size, len(figures), dtype=torch.float64, device=world.device)
    for i, figure in enumerate(figures):
        said[world.rank, i] = figure
    return add_up(world, said)


def agree(world: World, signal: int) -> int:
    """The number of a signal that any process got, else 0."""
    return signal if world.size == 1 else int(tell(world, signal).max())


def add_up(world: World, values: Tensor) -> Tensor:
    """Element-wise sum over processes: exact where all but one hold 0."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def take_turns(world: World, work: Sequence[Any], do: Callable[[Any], Any]) -> Iterator[Any]:
    """`do` of each piece of work, in order, on every process; each does every size-th piece itself.

    Raises UserError where another process has ended.
    """
    for first in range(0, len(work), world.size):
        turn = first + world.rank
        mine = [do(piece) for piece in work[turn:turn + 1]]             # one, or none where none is left
        yield from (result for results in exchange(world, mine) for result in results)


def exchange(world: World, mine: Any) -> list[Any]:
    """What each process has, in the order of their ranks."""
    if world.size == 1:
        return [mine]
    said: list[Any] = [None] * world.size
    try:
        dist.all_gather_object(said, mine)
    except RuntimeError as error:       # gloo's for a closed connection
        raise UserError("another process of torchrun has ended; mend what it said, and start all of them "
                        "again") from error
    return said


def wait_for_all(world: World) -> None:
    """Go on when every process is here."""
    if world.size > 1:
        dist.barrier()


def leave() -> None:
    """Part from the others, at the end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def whole(tensor: Any) -> Tensor:
    """A tensor that FSDP2 shards, gathered on every process; any other, itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(tensor: Tensor, parameter: Any) -> Tensor:
    """A whole tensor, sharded as the parameter is if it is; each process has the whole one already."""
    if not hasattr(parameter, "full_tensor") or tensor.shape != parameter.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements,
                             src_data_rank=None)
