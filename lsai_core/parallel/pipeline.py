"""Pipeline parallelism (Huang et al. 2019, arXiv:1811.06965), by `torch.distributed.pipelining`.

The blocks are cut into stages, one after the other, as even as their number allows; the first stage
has the embedding, the last one norm, output layer and loss. Micro-batches go through the stages,
and what is between two blocks travels from process to process, forwards and its gradient backwards.

`1f1b`: a stage a process; as soon as a stage may, it does the backward pass of a micro-batch before
the next forward pass, so that it keeps the activations of as many micro-batches as stages come
behind it (Narayanan et al. 2019, doi:10.1145/3341301.3359646). `interleaved`: two stages a process,
half as long, and half of the waiting at both ends of a step (Narayanan et al. 2021,
arXiv:2104.04473).

Each process updates its own parameters; the gradients' norm is that of all.

With `fsdp` > 1 there are several such pipelines, each with sequences of its own, and FSDP2 shards
what a process of one has among its fellows in the others. The schedules do with sharded stages what
they can: weights stay whole from a step's first forward pass to its last backward pass, gradients
are whole until then, and are summed over the pipelines and cut into slices once a step.
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from lsai_core.config.precision import weight_dtype
from lsai_core.config.train import TrainConfig
from lsai_core.model.loss import Reduction
from lsai_core.model.rope import rope_tables
from lsai_core.model.transformer import Transformer
from lsai_core.parallel.mesh import data_mesh


def stages_of(config: TrainConfig) -> list[range]:
    """The blocks of every stage, in order; process p of P has stages p, p + P, ..."""
    count = config.parallel.stages
    each, more = divmod(config.model.n_layers, count)
    ends = [index * each + min(index, more) for index in range(count + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def keep_own(model: Transformer, config: TrainConfig, mesh: DeviceMesh) -> None:
    """Take from `model` (on the meta device) what other processes have, in place."""
    stages, rank, processes = stages_of(config), mesh.get_local_rank(), mesh.size()
    own = {block for stage in stages[rank::processes] for block in stage}
    for index in range(len(model.blocks)):
        if index not in own:
            model.blocks[index] = nn.Identity()
    if rank > 0:
        model.embedding = nn.Identity()  # type: ignore[assignment]
    if rank < processes - 1:
        model.norm = nn.Identity()  # type: ignore[assignment]
        model.output = nn.Identity()  # type: ignore[assignment]


class _Stage(nn.Module):
    """Some blocks, with what stands before the first and behind the last of the model."""

    def __init__(self, model: Transformer, blocks: range, first: bool, last: bool) -> None:
        super().__init__()
        self.config = model.config
        self.embedding = model.embedding if first else nn.Identity()
        self.blocks = nn.ModuleList(model.blocks[index] for index in blocks)
        self.norm = model.norm if last else nn.Identity()
        self.output = model.output if last else None  # its gradient is scaled with the others

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, S), or hidden states (B, S, D), to hidden states."""
        cos, sin = rope_tables(self.config, torch.arange(x.shape[1], device=x.device))
        x_BSD = self.embedding(x)
        for block in self.blocks:
            x_BSD = block(x_BSD, cos, sin)
        return self.norm(x_BSD)


class Pipeline:
    """The stages of this process, and how micro-batches go through all of them."""

    def __init__(self, model: Transformer, config: TrainConfig, mesh: DeviceMesh) -> None:
        stages, dtype = stages_of(config), weight_dtype(config.precision)
        rank, self.processes = mesh.get_local_rank("pp"), config.parallel.pp
        self.model, self.group, self.count = model, mesh.get_group("pp"), len(stages)
        self.device = next(model.parameters()).device
        shape = (config.batch_size, config.seq_len)
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        self.hidden = torch.empty(
            (*shape, config.model.d_model), dtype=dtype, device="meta", requires_grad=True
        )
        self.modules = {
            index: _Stage(model, stages[index], index == 0, index == self.count - 1)
            for index in range(rank, self.count, self.processes)
        }
        if config.parallel.sharded:  # by this the schedules know that their parameters are
            for module in self.modules.values():
                fully_shard(module, mesh=data_mesh(mesh), reshard_after_forward=False)
        self.last = self.count - 1 in self.modules
        made: list[Any] = [
            PipelineStage(
                module,
                index,
                self.count,
                self.device,
                input_args=(self.hidden if index else tokens,),
                output_args=(self.hidden,),
                group=self.group,
            )
            for index, module in self.modules.items()
        ]
        several = len(made) > 1
        kind: Any = ScheduleInterleaved1F1B if several else Schedule1F1B
        self.schedule = kind(made if several else made[0], config.grad_accum, loss_fn=self._loss)

    def step(self, x_NS: Tensor, y_NS: Tensor) -> Tensor:
        """All micro-batches of a step, forward and backward; returns their mean loss."""
        losses: list[Tensor] = []
        given = (x_NS,) if 0 in self.modules else ()
        wanted: dict[str, Any] = {"target": y_NS, "losses": losses} if self.last else {}
        self.schedule.step(*given, **wanted, return_outputs=False)
        return self._of_last(torch.stack(losses).mean().detach() if losses else None)

    @torch.no_grad()
    def evaluate(self, x_BS: Tensor, y_BS: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The loss of one batch, which goes through the stages alone; the same on each process."""
        x = x_BS
        for index, module in sorted(self.modules.items()):
            before, after = ((index + way) % self.processes for way in (-1, 1))
            if index > 0:
                x = self.hidden.new_empty((*x_BS.shape, self.hidden.shape[2]), device=self.device)
                dist.recv(x, group=self.group, group_src=before)
            x = module(x)
            if index < self.count - 1:
                dist.send(x, group=self.group, group_dst=after)
        loss = self.model.loss(x, self.model.output_weight, y_BS, reduction) if self.last else None
        return self._of_last(loss)

    def _loss(self, hidden_BSD: Tensor, y_BS: Tensor) -> Tensor:
        return self.model.loss(hidden_BSD, self.model.output_weight, y_BS)

    def _of_last(self, loss: Tensor | None) -> Tensor:
        loss = torch.zeros((), device=self.device) if loss is None else loss.clone()
        dist.all_reduce(loss, group=self.group)
        return loss
