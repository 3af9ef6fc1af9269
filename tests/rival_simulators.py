"""SimuMax and Primus, as their authors say to run them: both simulate Megatron-LM."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from rivals import Asked, Said

# Of the systems that it ships, none of which is an H100; memory does not depend on it.
SYSTEM = "b200_bf16_ceperm"
UNITS = {"GB": 1.0, "MB": 2**-10, "KB": 2**-20}


def simumax(checkout: Path) -> Callable[[Asked], Said]:
    """Asks `PerfLLM.analysis_mem`, as `examples/perf_llama3_8b_tp1_pp2.py` does; of a pipeline the
    stage that needs the most."""
    os.environ["SIMUMAX_TMP_PATH"] = tempfile.mkdtemp()
    sys.path.insert(0, str(checkout))
    from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
    from simumax.core.perf_llm import PerfLLM

    def ask(asked: Asked) -> Said:
        model = ModelConfig(**_simumax_model(asked))
        model.padded_vocab_size = False
        program = PerfLLM()
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program.configure(
                strategy_config=StrategyConfig(**_simumax_strategy(asked)),
                model_config=model,
                system_config=SystemConfig.init_from_config_file(
                    str(checkout / "configs" / "system" / f"{SYSTEM}.json")
                ),
            )
            program.run_estimate()
            found = program.analysis_mem().data
        stages = [found] if asked.config.parallel.pp == 1 else list(found.values())
        names = ("peak_mem", "peak_mem_with_reserved")
        return Said(*(max(_gib(stage[name]) for stage in stages) for name in names))

    return ask


def _simumax_model(asked: Asked) -> dict[str, Any]:
    model = asked.config.model
    return {
        "model_type": "dense",
        "model_name": "asked",
        "hidden_size": model.d_model,
        "head_num": model.n_heads,
        "kv_head_num": model.n_kv_heads,
        "head_size": model.head_dim,
        "intermediate_size": model.d_ff,
        "layer_num": model.n_layers,
        "vocab_size": model.vocab_size,
        "use_swiglu": True,
    }


def _simumax_strategy(asked: Asked) -> dict[str, Any]:
    config, parallel = asked.config, asked.config.parallel
    again = config.grad_checkpoint == "full"
    megatron = asked.trainer == "megatron"
    return {
        "seq_len": config.seq_len,
        "micro_batch_size": config.batch_size,
        "micro_batch_num": config.grad_accum,
        "world_size": parallel.tp * parallel.pp * asked.masters,
        "tp_size": parallel.tp,
        "pp_size": parallel.pp,
        "enable_sequence_parallel": parallel.tp > 1,
        "use_flash_sdp": asked.kernel != "eager",
        "use_math_sdp": asked.kernel == "eager",
        "use_fused_swiglu": megatron or config.blocks == "fused",
        "enable_recompute": again,
        "recompute_granularity": "full_block" if again else None,
        "recompute_layer_num": config.model.n_layers if again else 0,
        # as its own table was made (`docs/b200/b200_real_repro_guide.md`)
        "cross_entropy_loss_fusion": megatron,
        "te_version": "2.11.0" if megatron else None,
    }


def _gib(size: str | float) -> float:
    if isinstance(size, str):
        number, unit = size.split()
        return float(number) * UNITS[unit]
    return size / 2**30


def primus(checkout: Path) -> Callable[[Asked], Said]:
    """Asks `projection memory --memory-mode simulate`, which needs no GPU; of a pipeline the stage
    that needs the most."""

    def ask(asked: Asked) -> Said:
        parallel = asked.config.parallel
        processes = parallel.tp * parallel.pp * asked.masters
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "asked.yaml")
            path.write_text(yaml.safe_dump(_primus_config(asked)))
            command = [sys.executable, str(checkout / "primus" / "cli" / "main.py")]
            command += ["projection", "memory", "--memory-mode", "simulate", "--config", str(path)]
            sizes = []
            for stage in range(parallel.pp):
                ranks = {
                    "NNODES": -(-processes // 8),
                    "GPUS_PER_NODE": min(8, processes),
                    "RANK": stage * processes // parallel.pp,
                }
                told = os.environ | {name: str(value) for name, value in ranks.items()}
                printed = subprocess.run(
                    command, cwd=folder, env=told, capture_output=True, text=True, check=True
                ).stdout
                (size,) = re.findall(r"Projected Total Memory: ([\d.]+) GB", printed)
                sizes.append(float(size))  # its GB are 2^30 bytes
        return Said(max(sizes))

    return ask


def _primus_config(asked: Asked) -> dict[str, Any]:
    """An experiment as in `examples/megatron/configs`."""
    config, model, parallel = asked.config, asked.config.model, asked.config.parallel
    again = config.grad_checkpoint == "full"
    overrides = {
        "num_layers": model.n_layers,
        "hidden_size": model.d_model,
        "ffn_hidden_size": model.d_ff,
        "num_attention_heads": model.n_heads,
        "group_query_attention": model.n_kv_heads != model.n_heads,
        "num_query_groups": model.n_kv_heads,
        "padded_vocab_size": model.vocab_size,
        "seq_length": config.seq_len,
        "max_position_embeddings": config.seq_len,
        "micro_batch_size": config.batch_size,
        "global_batch_size": config.batch_size * config.grad_accum * asked.masters,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "expert_model_parallel_size": 1,
        "use_distributed_optimizer": True,
        "use_flash_attn": asked.kernel != "eager",
        "cross_entropy_loss_fusion": asked.trainer == "megatron",
        "recompute_granularity": "full" if again else None,
        "recompute_method": "uniform" if again else None,
        "recompute_num_layers": 1 if again else None,
        "mock_data": True,
    }
    trainer = {"framework": "megatron", "config": "pre_trainer.yaml", "model": "llama3.1_8B.yaml"}
    return {
        "work_group": "asked",
        "user_name": "asked",
        "exp_name": "asked",
        "workspace": "./output",
        "modules": {"pre_trainer": trainer | {"overrides": overrides}},
    }
