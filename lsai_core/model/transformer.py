"""A Llama-style decoder in one file: embedding, N blocks of (attention, gated MLP), norm, output
layer.

    tokens (B, S) -> embedding (B, S, d) -> [x + attention(norm(x)); x + mlp(norm(x))] * N -> norm
    -> logits (B, S, V)

RMSNorm before each sublayer, rotary positions, grouped-query attention, SwiGLU, no biases: Llama 2
and 3 (arXiv:2307.09288, arXiv:2407.21783). Query, key and value share one matrix, and so do gate
and up: one large product instead of three small ones, and one cast of the input instead of three
where the product runs in fp8.

Gradient checkpointing lives inside the block, so that whatever is applied to a block from outside
(torch.compile, FSDP) sees it; what it keeps is decided in `lsai_core.model.recompute`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lsai_core.attention.choice import attention
from lsai_core.config.model import (
    AttentionConfig,
    BlockCheckpoint,
    GradCheckpoint,
    ModelConfig,
    in_blocks,
)
from lsai_core.model.feed_forward import MLP
from lsai_core.model.loss import Reduction, linear_cross_entropy
from lsai_core.model.norm import Norm, norm_and_residual
from lsai_core.model.recompute import (
    attention_contexts,
    full_contexts,
    selective_contexts,
)
from lsai_core.model.rope import rope_tables, rotate


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of a model. `embedding` is the token table; tied to the output layer, it is
    counted once."""

    total: int
    embedding: int
    non_embedding: int


def count_parameters(config: ModelConfig) -> Parameters:
    """Counts of the model that is built from `config`; no parameter gets memory."""
    return _counted(config.model_dump_json())


@functools.lru_cache(maxsize=256)
def _counted(config: str) -> Parameters:
    model = shaped(ModelConfig.model_validate_json(config))
    total, embedding = sum(p.numel() for p in model.parameters()), model.embedding.weight.numel()
    return Parameters(total=total, embedding=embedding, non_embedding=total - embedding)


def matmul_parameters(config: ModelConfig) -> int:
    """Parameters that a token is multiplied with: all but an embedding table that is only looked
    up."""
    parameters = count_parameters(config)
    return parameters.total if config.tie_embeddings else parameters.non_embedding


class SharedSequences(Protocol):
    """Sequences of which this process has a slice each (`lsai_core.context.methods`)."""

    @property
    def positions_S(self) -> Tensor: ...
    def shard(self, x: Tensor) -> Tensor: ...
    def attention(self, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> Tensor: ...


class Attention(nn.Module):
    """Grouped-query self-attention over (B, S, d) with rotary positions."""

    def __init__(self, config: ModelConfig, attention_config: AttentionConfig) -> None:
        super().__init__()
        self.heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
        self.head_dim = config.head_dim
        self.backend, self.window = attention_config.backend, attention_config.window
        self.context: SharedSequences | None = None
        self.attend = attention  # a prediction hands over what stands for a GPU's kernel
        self.qkv = nn.Linear(config.d_model, sum(self.heads) * self.head_dim, bias=False)
        self.output = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv_BSHD = self.qkv(x_BSD).unflatten(-1, (-1, self.head_dim))
        q_BSHD, k_BSKD, v_BSKD = qkv_BSHD.split(self.heads, dim=2)
        q_BSHD, k_BSKD = rotate(q_BSHD, cos, sin), rotate(k_BSKD, cos, sin)
        # A copy of v, because a view of qkv would keep all of it for the backward pass.
        if self.context is not None:
            out_BSHD = self.context.attention(q_BSHD, k_BSKD, v_BSKD.contiguous())
        else:
            out_BSHD = self.attend(
                q_BSHD, k_BSKD, v_BSKD.contiguous(), backend=self.backend, window=self.window
            )
        return self.output(out_BSHD.flatten(2))


class Block(nn.Module):
    """One decoder layer, (B, S, d) -> (B, S, d), with its gradient checkpointing inside."""

    def __init__(
        self,
        config: ModelConfig,
        attention_config: AttentionConfig,
        grad_checkpoint: BlockCheckpoint,
    ) -> None:
        super().__init__()
        self.attention_norm = Norm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config, attention_config)
        self.mlp_norm = Norm(config.d_model, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.grad_checkpoint = grad_checkpoint
        self.selective_contexts = selective_contexts  # what `selective` keeps
        self.fused = False

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mode = self.grad_checkpoint
        if mode == "none" or not torch.is_grad_enabled():
            return self._layer(x_BSD, cos, sin)
        # The model has no dropout, hence no random state to preserve.
        recompute = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        whole = (
            functools.partial(recompute, context_fn=full_contexts)
            if torch.compiler.is_compiling()
            else recompute
        )
        if mode == "full":
            return whole(self._layer, x_BSD, cos, sin)
        if mode == "mlp":
            x_BSD = recompute(self._attend, x_BSD, cos, sin, context_fn=self.selective_contexts)
            return whole(self._feed_forward, x_BSD)
        contexts = attention_contexts if mode == "attention" else self.selective_contexts
        return recompute(self._layer, x_BSD, cos, sin, context_fn=contexts)

    def _layer(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._feed_forward(self._attend(x_BSD, cos, sin))

    def _attend(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.fused:
            normed_BSD, x_BSD = norm_and_residual(x_BSD, self.attention_norm)
            return x_BSD + self.attention(normed_BSD, cos, sin)
        return x_BSD + self.attention(self.attention_norm(x_BSD), cos, sin)

    def _feed_forward(self, x_BSD: Tensor) -> Tensor:
        if self.fused:
            normed_BSD, x_BSD = norm_and_residual(x_BSD, self.mlp_norm)
            return x_BSD + self.mlp(normed_BSD)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


def _nothing(*_: Any) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def _as_they_are(name: str) -> None:
    return None


class Transformer(nn.Module):
    """The decoder. Weights are initialised with seed 0, except on the meta device (see
    `build_model`).

    `output` is the output layer; with tied embeddings it is None and the token table takes its
    place (`output_weight`), so that a state dict names each tensor once. `grad_checkpoint`: a mode
    of the model, or what each block does.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionConfig | None = None,
        *,
        grad_checkpoint: GradCheckpoint | Sequence[BlockCheckpoint] = "none",
    ) -> None:
        super().__init__()
        self.config = config
        self.attention_config = attention or AttentionConfig(window=None)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        modes = (
            in_blocks(grad_checkpoint, config.n_layers)
            if isinstance(grad_checkpoint, str)
            else grad_checkpoint
        )
        self.blocks = nn.ModuleList(Block(config, self.attention_config, mode) for mode in modes)
        self.norm = Norm(config.d_model, eps=config.norm_eps)
        self.output = (
            None
            if config.tie_embeddings
            else nn.Linear(config.d_model, config.vocab_size, bias=False)
        )
        # By a parameter's name: which row of the whole matrix each row is, where processes share
        # matrices and have them in another order; None where the order is the same.
        self.row_order: Callable[[str], Tensor | None] = _as_they_are
        self.context: SharedSequences | None = None
        self._positions_S: Tensor | None = None  # of this rank's slice, on the device
        # What stands around each block's forward pass, by its index and its input (B, S, d).
        self.around_block: Callable[[int, Tensor], AbstractContextManager[Any]] = _nothing
        self.loss = linear_cross_entropy
        # What processes that share the model do around a micro-batch, the last of a step or not,
        # and what they call in its place.
        self.micro_batch: Callable[[bool], AbstractContextManager[Any]] = _nothing
        self.wrapper: Callable[..., Tensor] | None = None
        # Where processes share the blocks: the forward and backward passes of a step, from all its
        # tokens (N, S) and targets to the mean loss; and the processes.
        self.pipeline: Callable[[Tensor, Tensor], Tensor] | None = None
        self.pipeline_group: Any = None
        self.bf16_residual = False  # values between blocks in bf16, whatever the weights are
        # of delayed scaling, once layers are converted to fp8 (`lsai_core.fp8`)
        self.fp8_scales: Any = None
        if not self.embedding.weight.is_meta:
            self.init_weights()

    def fuse(self, mlp_chunk: int | None = None) -> None:
        """Use the project's kernels within blocks (`lsai_core.model.norm`,
        `lsai_core.model.feed_forward`): same parameters, same function. A feed-forward layer whose
        projection was replaced stays as it is. `mlp_chunk`: tokens that it takes at a time."""
        for block in self.blocks:
            assert isinstance(block, Block)
            block.fused = True
            if isinstance(block.mlp, MLP):
                block.mlp.fused = type(block.mlp.down) is nn.Linear
                block.mlp.chunk = mlp_chunk

    def share_sequence(self, context: SharedSequences) -> None:
        """From now on inputs are slices of sequences that a group of ranks shares
        (`lsai_core.context`).

        Positions follow the group's layout. A mean loss is over this rank's slice; slices are
        equal, so the mean over ranks is that of the whole sequence, for gradients as well. The
        window and kernel are those of `context`.
        """
        self.context, self._positions_S = context, None
        for block in self.blocks:
            assert isinstance(block, Block)
            block.attention.context = context

    @property
    def output_weight(self) -> Tensor:
        """(V, d), the matrix that turns hidden states into logits."""
        return self.embedding.weight if self.output is None else self.output.weight

    def forward(
        self, tokens_BS: Tensor, targets_BS: Tensor | None = None, reduction: Reduction = "mean"
    ) -> Tensor:
        """Logits (B, S, V) for integer tokens (B, S); position s sees the tokens up to and
        including s. With targets the fused loss instead (`lsai_core.model.loss`): fp32 scalar in
        nats, no logits kept. It is computed inside the forward pass because only there a sharded
        model (FSDP) holds its whole output layer.
        """
        hidden_BSD = self.hidden(tokens_BS)
        if targets_BS is not None:
            return self.loss(hidden_BSD, self.output_weight, targets_BS, reduction)
        return (
            F.linear(hidden_BSD, self.embedding.weight)
            if self.output is None
            else self.output(hidden_BSD)
        )

    def hidden(self, tokens_BS: Tensor, positions_S: Tensor | None = None) -> Tensor:
        """The normalised last hidden states (B, S, d): the output layer's input, for losses that
        never hold all logits. `positions_S`: absolute positions of the columns; default 0..S-1, or
        those of this rank's slice (`share_sequence`)."""
        if positions_S is None and self.context is not None:
            # once: a copy from the host would wait for the GPU in every step
            if self._positions_S is None:
                self._positions_S = self.context.positions_S.to(tokens_BS.device)
            positions_S = self._positions_S
        if positions_S is None:
            positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        cos, sin = rope_tables(self.config, positions_S)
        x_BSD = self.embedding(tokens_BS)
        if self.bf16_residual:
            x_BSD = x_BSD.bfloat16()
        for index, block in enumerate(self.blocks):
            with self.around_block(index, x_BSD):
                x_BSD = block(x_BSD, cos, sin)
        return self.norm(x_BSD)

    @torch.no_grad()
    def init_weights(self, seed: int = 0, draw_on: torch.device | None = None) -> None:
        """Fill all parameters in place: norms 1, matrices normal(0, 0.02), the embedding normal(0,
        `embedding_std`) unless it is tied.

        The two projections back into the residual stream are scaled by 1/sqrt(2 * n_layers)
        (GPT-2's rule: a sum of 2N contributions keeps its size). The stream itself begins at size
        1 by default, as in torchtitan: the first norm divides by what it begins at, so that 0.02
        would make the embedding's gradient 50 times as large, and early training unstable. A tied
        embedding is the output layer, too, which wants small weights.

        Each parameter draws from a generator seeded by (seed, its name): the values do not depend
        on the order of initialisation, and a sharded model (DTensor) gets its slice of the values
        that the whole model would have.

        Generators of CPUs and GPUs differ. Parameters that wait on the host for a GPU are drawn
        there (`draw_on`; by default, where they are), so that offloading does not change what a run
        begins with.
        """
        for name, parameter in self.named_parameters():
            values = initial_values(
                self.config, name, parameter.shape, seed, draw_on or parameter.device
            )
            fill(parameter, values, self.row_order(name))


def initial_values(
    config: ModelConfig, name: str, shape: torch.Size, seed: int, device: torch.device
) -> Tensor:
    """What the whole parameter `name` begins with (see `Transformer.init_weights`): float32, drawn
    on `device`."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
    std = 0.02 / (2 * config.n_layers) ** 0.5 if residual else 0.02
    if name == "embedding.weight" and not config.tie_embeddings:
        std = config.embedding_std
    key = f"{seed}/{name.replace('_orig_mod.', '')}"
    drawn_from = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
    generator = torch.Generator(device).manual_seed(drawn_from)
    values = torch.empty(shape, device=device, dtype=torch.float32)
    return values.normal_(0.0, std, generator=generator)


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor, order: Tensor | None = None) -> None:
    """Copy whole `values` into a parameter, of which this process may hold a slice only, of rows in
    another `order` (`Transformer.row_order`)."""
    if order is not None:
        values = values[order.to(values.device)]
    # Imported here: it takes a second, and most who import this module (chapters, predictions,
    # commands) fill no weights.
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor):
        # No communication: every rank has the same values and keeps its own part.
        values = distribute_tensor(
            values, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(values)


class _NoValues(TorchFunctionMode):
    """Lets new modules leave their parameters as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            # The argument is called `tensor` in all of them.
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def shaped(
    config: ModelConfig,
    attention: AttentionConfig | None = None,
    *,
    grad_checkpoint: GradCheckpoint | Sequence[BlockCheckpoint] = "none",
) -> Transformer:
    """A `Transformer` on the meta device: shapes alone, in fp32."""
    with torch.device("meta"), _NoValues():
        return Transformer(config, attention, grad_checkpoint=grad_checkpoint)


def build_model(
    config: ModelConfig,
    attention: AttentionConfig | None = None,
    *,
    grad_checkpoint: GradCheckpoint | Sequence[BlockCheckpoint] = "none",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Transformer:
    """A `Transformer` with parameters of `dtype` on `device`: shaped on the meta device, then
    filled in place, once."""
    model = shaped(config, attention, grad_checkpoint=grad_checkpoint)
    model.to(dtype).to_empty(device=device)
    model.init_weights(seed)
    return model
