"""torchtitan 0.3: as `titan.py`, but what options cannot say is said by a function, `llama`, that
returns the configuration.

Tested on a CPU only, with 0.3.0: neither speed nor memory was ever measured with it. It needs torch
2.14, for `torch.distributed.set_timeout`; its fp8 is rowwise only. Its own defaults are kept: the
loss in chunks, the forward and backward pass as a CUDA graph, so that what a step needs lies in the
graph's pool: of its memory, look at what is reserved. Its own configurations mask attention at the
ends of documents with FlexAttention; here it gets windows without ends, as all trainers do, and
attention is SDPA.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from lsai_core.config.model import ModelConfig
from lsai_lab.peers.config import PeerConfig
from lsai_lab.peers.titan import FLAVOR, as_words, command, loader, rope_scaling, shared, watched
from lsai_lab.peers.watch import Job


def options(config: PeerConfig, folder: Path) -> list[str]:
    """The options for the command line of torchtitan 0.3; `llama` builds the other settings."""
    where = {"dump_folder": folder / "out", "hf_assets_path": folder / "tokenizer"}
    return as_words({"module": __name__, "config": llama.__name__, **where, **shared(config)})


start = partial(command, options)


def llama() -> Any:
    """torchtitan's configuration of the job, where it is not said by options."""
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.models import llama3

    # with what its own configurations are made of
    from torchtitan.models.llama3 import config_registry as its

    config, fp8 = Job().config, []
    optim, model = config.optim, shape(config.model, config.seq_len)
    llama3.llama3_configs[FLAVOR] = lambda **_backends: model
    if config.fp8 != "none":
        fp8 = [
            its.Float8LinearConverter.Config(
                filter_fqns=["lm_head"], model_compile_enabled=config.compile
            )
        ]
    optimizer = its.default_adamw(
        optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    (matrices,) = optimizer.param_groups
    vectors = replace(
        matrices,
        pattern="norm",
        optimizer_kwargs={**matrices.optimizer_kwargs, "weight_decay": 0.0},
    )
    optimizer.param_groups = [vectors, matrices]  # the first that fits a name is taken
    keeps = {"none": None, "selective": its.SelectiveAC.Config(), "full": its.FullAC.Config()}
    return its.Trainer.Config(
        model_spec=llama3.model_registry(FLAVOR, converters=fp8),
        dataloader=ParallelAwareDataloader.Config(),
        loss=its.ChunkedLossWrapper.Config(
            loss_fn=its.CrossEntropyLoss.Config(global_vocab_size=model.vocab_size)
        ),
        optimizer=optimizer,
        activation_checkpoint=keeps[config.grad_checkpoint],
    )


def shape(model: ModelConfig, seq_len: int) -> Any:
    """torchtitan's description of a Llama of this shape."""
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    d, v = model.d_model, model.vocab_size
    rope = llama3.ComplexRoPE.Config(
        dim=model.head_dim,
        max_seq_len=seq_len,
        theta=model.rope_theta,
        scaling="llama",
        **rope_scaling(model),
    )
    described = llama3.Llama3Model.Config(
        dim=d,
        vocab_size=v,
        norm=llama3.RMSNorm.Config(normalized_shape=d, param_init=llama3._NORM_INIT),
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=v, embedding_dim=d, param_init=llama3._EMBEDDING_INIT
        ),
        lm_head=llama3.Linear.Config(
            in_features=d, out_features=v, param_init=llama3._output_linear_init(d)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=model.n_layers,
            dim=d,
            n_heads=model.n_heads,
            n_kv_heads=model.n_kv_heads,
            hidden_dim=model.d_ff,
            rope=rope,
            attn_backend="flex",
        ),
    )
    for _name, norm, *_ in described.traverse(llama3.RMSNorm.Config):
        norm.eps = model.norm_eps
    for _name, _flex, attention, key in described.traverse(FlexAttention.Config):
        setattr(attention, key, ScaledDotProductAttention.Config())
    return described


def renamed(model: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """torchtitan's tensors from those of a Hugging Face Llama of this shape. Its adapter knows q, k
    and v as three matrices, which its layer makes one of when it loads them."""
    from torchtitan.models.common.attention import FusedQKVLinear
    from torchtitan.models.llama3 import Llama3StateDictAdapter

    found: dict[str, Tensor] = Llama3StateDictAdapter(shape(model, 1), None).from_hf(tensors)
    heads = SimpleNamespace(head_dim=model.head_dim, heads_per_kv=model.n_heads // model.n_kv_heads)
    for name in [name for name in found if name.endswith(".wq.weight")]:
        FusedQKVLinear._merge_qkv_on_load(heads, found, name.removesuffix("wq.weight"))
    return found


def train(job: Job) -> None:
    """Run torchtitan's own main in this process, with the configuration that `llama` builds."""
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.train import Trainer, main

    ParallelAwareDataloader.Config._owner = partial(loader, job)
    Trainer.Config._owner = watched(Trainer, job, partial(renamed, job.config.model))
    main()
