"""Megatron-Core 0.19 with Transformer Engine: how it is started, the options it gets, and what its
process does.

Megatron-Core is a library; its user writes the loop. This one has the parts that its guides name:
layers of Transformer Engine (norms fused into the matrix products, cuDNN's attention, one kernel
for the rotary embeddings), SwiGLU and cross-entropy fused, its schedule, which tells the fp8 layers
when to cast their weights anew, and one CUDA graph of a whole forward and backward pass.

- `precision: bf16` is the work of a single GPU: weights, gradients and AdamW states in bf16.
  Megatron's own optimizers keep fp32 masters, which 80 GB do not hold: torch's fused AdamW stands
  in for them. Gradients come without a buffer, which would keep another two bytes a parameter
  through the forward pass.
- `precision: bf16_autocast` is Megatron's usual way: bf16 weights, each process with a share of the
  fp32 masters and states (distributed optimizer), gradients added up in fp32 within the product,
  their sums and the gathering of weights beside the computation, weights gathered in fp8 where the
  products are. `parallel.tp` processes share the matrices, with sequence parallelism.

Its GPTModel takes no new features since 0.19, but runs the same kernels as its HybridModel.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsai_core.training.step import learning_rate
from lsai_lab.data import Dataset
from lsai_lab.launch.launch import torchrun
from lsai_lab.peers.config import GRAPH_WARMUP, WORKER, PeerConfig
from lsai_lab.peers.megatron_optimizer import Bf16Update, shared
from lsai_lab.peers.megatron_weights import fill
from lsai_lab.peers.watch import Job, Watch

Batch = dict[str, Tensor]


def start(config: PeerConfig, _dataset: Dataset, _folder: Path) -> tuple[list[str], dict[str, str]]:
    """Command line and variables that start it. A CUDA graph wants memory that does not move; with
    tensor parallelism one queue keeps the order of products and messages."""
    variables = {} if config.cuda_graph else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    if config.parallel.tp > 1:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return [*torchrun(config.parallel.world_size), "-m", WORKER], variables


def options(config: PeerConfig) -> dict[str, Any]:
    """Keyword arguments of `TransformerConfig`."""
    model = config.model
    values: dict[str, Any] = {
        "num_layers": model.n_layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.n_heads,
        "num_query_groups": model.n_kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.d_ff,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,  # for the output layer that would need APEX
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "apply_rope_fusion": True,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
        "tensor_model_parallel_size": config.parallel.tp,
        "sequence_parallel": config.parallel.tp > 1,
    }
    if config.fp8 != "none":
        values |= {"fp8": "hybrid", "fp8_recipe": config.fp8}
        values["fp8_param"] = config.precision == "bf16_autocast"
        # With one micro-batch a step a cast of the weights serves that step alone.
        values["disable_parameter_transpose_cache"] = True
    if config.cuda_graph:
        values |= {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}
        values["cuda_graph_warmup_steps"] = GRAPH_WARMUP
    if config.grad_checkpoint == "full":
        values |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        values["recompute_num_layers"] = 1
    elif config.grad_checkpoint == "selective":
        values |= {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    return values


def tuning(config: PeerConfig, _on_gpu: bool) -> str:
    """The options in one line, as a person would write them."""
    shown = ", ".join(
        f"{name}={getattr(value, '__name__', value)!s}" for name, value in options(config).items()
    )
    return f"TransformerConfig({shown})"


def build(config: PeerConfig, layer: Any, **changes: Any) -> nn.Module:
    """Megatron's GPTModel of our shape, of layers of this spec; `changes` to its options."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    return GPTModel(
        config=TransformerConfig(**options(config) | changes),
        transformer_layer_spec=layer,
        vocab_size=config.model.vocab_size,
        max_sequence_length=config.seq_len,
        position_embedding_type="rope",
        rotary_base=int(config.model.rope_theta),
        share_embeddings_and_output_weights=config.model.tie_embeddings,
    )


def batches(job: Job, rank: int, readers: int) -> Iterator[Batch]:
    """The micro-batches of this process, (B, S) in the host's pinned memory."""
    config, rows = job.config, job.windows()[rank::readers]
    for at in range(0, len(rows), config.batch_size):
        inputs, targets = zip(*rows[at : at + config.batch_size], strict=True)
        found = {"tokens": torch.stack(inputs), "labels": torch.stack(targets)}
        yield {name: values.pin_memory() for name, values in found.items()}


def forward_step(batches: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """What Megatron's schedule calls: losses of each token, and how they become one."""
    batch = {name: values.cuda(non_blocking=True) for name, values in next(batches).items()}
    tokens_BS = batch["tokens"]
    positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
    losses_BS = model(tokens_BS, positions_BS, None, labels=batch["labels"])

    def mean(losses_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses_BS.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return losses_BS, mean


def train(job: Job) -> None:
    """Build the model and its optimizer in this process, train, and write the results."""
    import transformer_engine.pytorch  # noqa: F401  (before Megatron looks for it)
    from megatron.core import parallel_state
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    config, device = job.config, torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    parallel_state.initialize_model_parallel(config.parallel.tp)
    model_parallel_cuda_manual_seed(config.seed, te_rng_tracker=config.cuda_graph)
    watch = Watch(job, device)
    model = build(config, get_gpt_layer_with_transformer_engine_spec()).cuda()
    rank = parallel_state.get_tensor_model_parallel_rank()
    fill(model, config.model, config.seed, device, rank, config.parallel.tp)
    torch.cuda.empty_cache()
    if config.parallel.tp == 1:
        watch.check_size(model)
    plain = config.precision == "bf16"
    wrapped, optimizer = (
        (model, Bf16Update(model, config.optim)) if plain else shared(model, config)
    )
    run = get_forward_backward_func()
    if config.cuda_graph:
        run = FullCudaGraphWrapper(run, GRAPH_WARMUP)
    data = batches(job, parallel_state.get_data_parallel_rank(), config.parallel.readers)
    watch.begin()
    for step in range(config.steps):
        if not plain:
            wrapped.zero_grad_buffer()  # type: ignore[operator]
        # What a graph has written stays where it is, and the next replay writes over it.
        if not (plain and config.cuda_graph and step > GRAPH_WARMUP):
            optimizer.zero_grad()
        (found,) = run(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[wrapped],
            num_microbatches=1,
            seq_length=config.seq_len,
            micro_batch_size=config.batch_size,
            forward_only=False,
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.steps, config.optim)
        optimizer.step()
        watch.loss(found["loss"])
        watch.step()
    if config.fp8 != "none" and not any(getattr(one, "fp8", False) for one in model.modules()):
        raise RuntimeError("fp8 was asked for, but no layer of the peer computed in fp8")
    watch.finish(attention_kernel="Transformer Engine (cuDNN)")
    torch.distributed.destroy_process_group()
