"""What other trainers keep in memory in a step that no option of ours keeps, for a prediction of
*their* memory.

Most of a peer is said in our own options: `loss: full`, `blocks: plain`, FSDP, checkpointing. The
rest is here, by the peer's code:

torchtitan   A compiled loss keeps bf16 logits and overwrites them by their gradient. Selective
             checkpointing repeats every second product of a block, where q, k, v, gate and up are
             products of their own.
torchtune    Norms in fp32, whose copies stay. Logits leave the model in fp32, so that the compiled
             loss keeps and makes fp32.
hf           Norms in fp32. The Trainer holds the logits, so that a compiled loss cannot overwrite
             them.
nanotron     bf16 weights, their DDP buckets, and fp32 masters, moments and gradients. The loss
             shifts fp32 logits in a copy.
megatron     Megatron-LM on Transformer Engine, with its distributed optimizer and fused loss: bf16
             weights, fp32 masters, moments and gradients; the loss overwrites bf16 logits. Its
             layers: `engine_layers.py`.
"""

import contextlib
import functools
import json
from collections import Counter
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy

from lsai_core.base.disk_cache import cached_on_disk
from lsai_core.config.strict import Strict
from lsai_core.config.train import TrainConfig
from lsai_core.fp8.recipes import linear_names
from lsai_core.model import transformer as decoder
from lsai_core.model.norm import Norm, whole_weight
from lsai_core.model.recompute import keep_expensive
from lsai_core.model.rope import rotate
from lsai_core.optimizers.base import FactorOptimizer, local
from lsai_core.parallel.tensor import whole_sequence
from lsai_core.prediction.fake_kernels import FusedRMSNorm
from lsai_core.prediction.memory import Prediction, differing_ranks, prediction_of
from lsai_core.prediction.simulate import Simulated, Trainer, simulate
from lsai_core.prediction.tracker import PurposeTracker
from lsai_lab.peers.engine_layers import stand_ins, use_engine_layers
from lsai_lab.peers.settings import PublishedBy


class TrainerMemory(Strict):
    """What a trainer keeps in memory in a step. The defaults are our own."""

    # eager: as ours. The others keep the logits: in place (their gradient overwrites them), held
    # (their gradient is made beside them), fp32 (in fp32, the gradient beside), shifted (a copy in
    # fp32, which its gradient overwrites).
    loss: Literal["eager", "in place", "held", "fp32", "shifted"] = "eager"
    norms: Literal["fused", "fp32"] = "fused"  # fp32: in plain operations, whose fp32 copies stay
    apart: bool = False  # q, k, v, gate and up are products of their own
    liger: bool = False  # SwiGLU's gradients overwrite gate and up
    every_second: bool = False  # selective checkpointing computes every second product again
    attention_again: bool = False  # and attention
    masters: int = 0  # so many processes share fp32 masters and moments; fp32 gradients are whole
    engine: bool = False  # Transformer Engine's layers in the blocks; no buckets in bf16
    step_in_backward: bool = False  # a gradient is let go as soon as it is there
    # If above 1, `selective` means: every so many-th block, counted from 1, keeps its input alone,
    # and the others keep everything.
    full_every: int = 0
    # torch's AdamW by this implementation: foreach makes its denominators for all parameters at
    # once, for-loop for one after the other.
    update: Literal["fused", "foreach", "for-loop"] = "fused"


def trainer_memory_of(peer: PublishedBy, config: TrainConfig) -> TrainerMemory:
    """What `peer` keeps in a run of `config`, with its own defaults."""
    if peer == "torchtitan":
        return TrainerMemory(
            loss="in place" if config.compile else "eager", apart=True, every_second=True
        )
    if peer == "nanotron":
        return TrainerMemory(loss="shifted", masters=1, step_in_backward=config.grad_accum == 1)
    if peer == "megatron":
        return TrainerMemory(loss="in place", masters=1, step_in_backward=True, engine=True)
    compiled_loss: Literal["held", "fp32"] = "held" if peer == "hf" else "fp32"
    return TrainerMemory(
        loss=compiled_loss if config.compile else "eager", apart=True, norms="fp32"
    )


class _Kept(torch.autograd.Function):
    """Keeps its inputs (`shifted`: copies); in the backward pass they are overwritten by their
    gradients, unless these are `fresh`."""

    @staticmethod
    def forward(ctx: Any, how: str, *inputs: Tensor) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(*(torch.empty_like(x) if how == "shifted" else x for x in inputs))
        return torch.empty_like(inputs[0]) if how == "swiglu" else torch.empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *(
            torch.empty_like(x) if ctx.how == "fresh" else x.detach() for x in ctx.saved_tensors
        )


class _Attention(decoder.Attention):
    def __init__(self, config: Any, attention_config: Any) -> None:
        super().__init__(config, attention_config)
        self.parts = nn.ModuleList(
            nn.Linear(config.d_model, n * self.head_dim, bias=False) for n in self.heads
        )
        del self.qkv

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part(x_BSD).unflatten(-1, (-1, self.head_dim)) for part in self.parts)
        out = self.attend(
            rotate(q, cos, sin), rotate(k, cos, sin), v, backend=self.backend, window=self.window
        )
        return self.output(out.flatten(2))


class _MLP(decoder.MLP):
    def __init__(self, liger: bool, config: Any) -> None:
        super().__init__(config)
        self.liger = liger
        self.gate, self.up = (nn.Linear(config.d_model, config.d_ff, bias=False) for _ in range(2))
        del self.gate_up

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate, up = self.gate(x_BSD), self.up(x_BSD)
        return self.down(_Kept.apply("swiglu", gate, up) if self.liger else F.silu(gate) * up)


class _Fp32Norm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return whole_weight(self) * (
            wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        ).to(x.dtype)


def _loss(kind: str, model: Any, x_BS: Tensor, *_targets_and_config: Any) -> Tensor:
    return _keep(kind, model(x_BS))


def _head(kind: str, hidden_BSD: Tensor, weight_VD: Tensor, *_targets: Any) -> Tensor:
    """The same where processes share matrices, or blocks: each keeps the logits of its words."""
    if isinstance(weight_VD, DTensor):
        hidden_BSD = whole_sequence(hidden_BSD, weight_VD.device_mesh)
        weight_VD = weight_VD.to_local()
    return _keep(kind, F.linear(hidden_BSD, weight_VD))


def _keep(kind: str, logits_BSV: Tensor) -> Tensor:
    tracker = PurposeTracker.active
    with tracker.purpose("loss") if tracker else contextlib.nullcontext():
        how = {"held": "fresh", "fp32": "fresh"}.get(kind, kind)
        return _Kept.apply(how, logits_BSV.float() if kind in ("fp32", "shifted") else logits_BSV)


def _policy(trainer_memory: TrainerMemory) -> Any:
    """torchtitan's, for one block (all compiled ones have one plan): of its products the first, the
    third and so on stay.

    Products in fp8 count, too: torchtitan's list of 2024 and 2025 does not name them, but its
    figures in fp8 are those in bf16.
    """
    counts = Counter[bool]()

    def keep(context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        product, again = (
            "mm.default" in str(operation),
            bool(getattr(context, "is_recompute", False)),
        )
        counts[again] += product
        if (
            counts[again] % 2 == 0
            if product
            else trainer_memory.attention_again and "attention" in str(operation)
        ):
            return CheckpointPolicy.PREFER_RECOMPUTE
        return keep_expensive(context, operation)

    return keep


def _linears(model: nn.Module, _fp8: Any) -> list[str]:
    """The layers that run in fp8, which have other names here."""
    return [
        name
        for name, part in model.named_modules()
        if type(part) is nn.Linear and name.startswith("blocks")
    ]


class _Masters(FactorOptimizer):
    """Keeps what nanotron does of each weight, or Megatron-LM (`engine`); `shared`: by so many
    processes."""

    def __init__(self, shared: int, engine: bool, model: nn.Module) -> None:
        self.shared, self.engine = shared, engine
        self.stand_ins = stand_ins(model)
        super().__init__([{"params": sorted(model.parameters(), key=lambda p: p.ndim < 2)}], lr=0.0)

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        weight = local(parameter.data)
        slices = {
            name: torch.empty(-(-weight.numel() // self.shared), dtype=torch.float32)
            for name in ("master", "m", "v")
        }
        slices["gradient"] = torch.empty_like(weight, dtype=torch.float32)
        if not self.engine:
            return slices | {"bucket": torch.empty_like(weight)}
        stand_in = self.stand_ins.pop(weight.shape, None)
        return slices if stand_in is None else slices | {"stand-in": torch.empty_like(stand_in)}


def _take_apart(liger: bool, model: decoder.Transformer) -> None:
    """Products of their own for q, k, v, gate and up."""
    with torch.device("meta"):
        for block in model.blocks:
            block.attention = _Attention(model.config, model.attention_config)
            block.mlp = _MLP(liger, model.config)


def _reshape(trainer_memory: TrainerMemory, model: decoder.Transformer) -> None:
    """Give `model` the layers and the checkpointing that the trainer has."""
    if trainer_memory.apart:
        _take_apart(trainer_memory.liger, model)
    if trainer_memory.engine:
        use_engine_layers(model)
    for index, block in enumerate(model.blocks if trainer_memory.full_every > 1 else ()):
        assert isinstance(block, decoder.Block)
        if block.grad_checkpoint == "selective":
            block.grad_checkpoint = "none" if (index + 1) % trainer_memory.full_every else "full"


def _update(together: bool, optimizer: torch.optim.Optimizer, _limit: float) -> Tensor:
    """torch's AdamW that is not fused: besides the states it makes the root of the second
    moments."""
    kept = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        root = torch.empty_like(parameter)
        if together:
            kept.append(root)
    return torch.empty(())


def trainer_of(trainer_memory: TrainerMemory, together: bool = False) -> Trainer:
    """The parts of a simulated step that differ from ours in that trainer. `together`: processes
    share matrices or blocks."""
    changed: dict[str, Any] = {"keeps_gradients": not trainer_memory.step_in_backward}
    if trainer_memory.apart or trainer_memory.engine or trainer_memory.full_every > 1:
        changed["reshape"] = functools.partial(_reshape, trainer_memory)
    if trainer_memory.update != "fused":
        changed["update"] = functools.partial(_update, trainer_memory.update == "foreach")
    if trainer_memory.loss != "eager":
        name, function = ("head", _head) if together else ("loss", _loss)
        changed[name] = functools.partial(function, trainer_memory.loss)
    if trainer_memory.every_second:
        changed["policy"] = functools.partial(_policy, trainer_memory)
    if trainer_memory.masters:
        changed["optimizer"] = functools.partial(
            _Masters, trainer_memory.masters, trainer_memory.engine
        )
    return Trainer(
        linear_names=_linears if trainer_memory.apart else linear_names,
        norm=_Fp32Norm if trainer_memory.norms == "fp32" else FusedRMSNorm,
        **changed,
    )


def predict_as(config: TrainConfig, trainer_memory: TrainerMemory) -> Prediction:
    """Predicted memory of a run of `config` by a trainer that keeps `trainer_memory`, on the GPU
    that needs the most. Raises UserError as `predict` does."""
    trainer = trainer_of(trainer_memory, config.parallel.tp * config.parallel.pp > 1)

    def of(rank: int) -> Prediction:
        asked = [config.model_dump_json(), trainer_memory.model_dump_json(), rank]

        def answer() -> dict[str, Any]:
            return asdict(simulate(config, rank=rank, trainer=trainer))

        found = Simulated(**cached_on_disk(__name__, json.dumps(asked), answer))
        return prediction_of(config, found, rank=rank)

    return max(map(of, differing_ranks(config)), key=lambda found: found.peak)
