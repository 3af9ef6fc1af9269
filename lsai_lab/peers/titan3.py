"""torchtitan 0.3: as `titan.py`, whose command line is shorter since a function, `llama`, returns the configuration.

Tested on a CPU only (torchtitan 0.3.0). It needs torch 2.14 (`torch.distributed.set_timeout`); its fp8 has a scale for each row only. Beside 0.2 it computes the loss in
chunks and replays a CUDA graph; both are its own defaults. Its own configurations mask attention where a document ends, with FlexAttention;
here windows of the same token file go in, which are whole as everywhere in this package, so that causal SDPA is the same work.
"""

from functools import partial
from pathlib import Path
from typing import Any

from lsai_core.config import ModelConfig
from lsai_lab.peers.config import PeerConfig
from lsai_lab.peers.titan import FLAVOR, as_words, command, loader, shared, watched
from lsai_lab.peers.watch import Job


def options(config: PeerConfig, folder: Path) -> list[str]:
    """Its options; `llama` says the rest."""
    where = {"dump_folder": folder / "out", "hf_assets_path": folder / "tokenizer"}
    return as_words({"module": __name__, "config": llama.__name__, **where, **shared(config)})


start = partial(command, options)


def llama() -> Any:
    """torchtitan's configuration of the job, where it is not said by options."""
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models import llama3
    from torchtitan.trainer import Trainer

    config = Job().config
    optim, model = config.optim, shape(config.model, config.seq_len)
    llama3.llama3_configs[FLAVOR] = lambda **_backends: model
    fp8 = [] if config.fp8 == "none" else [
        Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=config.compile)
    ]  # fmt: skip
    keeps = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    return Trainer.Config(
        model_spec=llama3.model_registry(FLAVOR, converters=fp8), dataloader=ParallelAwareDataloader.Config(),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=model.vocab_size)),
        optimizer=default_adamw(optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay),
        activation_checkpoint=keeps[config.grad_checkpoint],
    )  # fmt: skip


def shape(model: ModelConfig, seq_len: int) -> Any:
    """torchtitan's description of a Llama of this shape."""
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    width, vocabulary = model.d_model, model.vocab_size
    scaling = model.rope_scaling.model_dump() if model.rope_scaling else {"factor": 1.0}
    rope = llama3.ComplexRoPE.Config(
        dim=model.head_dim, max_seq_len=seq_len, theta=model.rope_theta, scaling="llama",
        scaling_factor=scaling.pop("factor"), **scaling,
    )  # fmt: skip
    described = llama3.Llama3Model.Config(
        dim=width, vocab_size=vocabulary, norm=llama3.RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=width, param_init=llama3._EMBEDDING_INIT
        ),
        lm_head=llama3.Linear.Config(
            in_features=width, out_features=vocabulary, param_init=llama3._output_linear_init(width)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=model.n_layers, dim=width, n_heads=model.n_heads, n_kv_heads=model.n_kv_heads,
            hidden_dim=model.d_ff, rope=rope, attn_backend="flex",
        ),
    )  # fmt: skip
    for _name, norm, *_ in described.traverse(llama3.RMSNorm.Config):
        norm.eps = model.norm_eps
    for _name, _flex, attention, key in described.traverse(FlexAttention.Config):
        setattr(attention, key, ScaledDotProductAttention.Config())
    return described


def train(job: Job) -> None:
    """The work of its process: torchtitan's own main, whose configurations build ours."""
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.train import Trainer, main

    ParallelAwareDataloader.Config._owner = partial(loader, job)
    Trainer.Config._owner = watched(Trainer, job)
    main()
