"""Every key of torchtitan's configuration files, from their first day to their last, and its
Llamas.

torchtitan was configured by TOML from April 2024 until 23 February 2026 (0.2.2), when Python took
its place. Keys came and went: `since` and `until` are the days (of its repository) between which
it knew one; without them it knew it all the time. What a key means to a prediction is said here:

use=READ        `titan_file.py` translates it
only=(...)      with any other value the run is another than can be predicted, and is refused
only and remark with any other value the remark is told beside the prediction
none of these   it decides nothing about memory
"""

from dataclasses import dataclass
from typing import Any

from lsai_core.config.model import PRESETS

BOOL, INT, NUMBER, TEXT = "true or false", "a whole number", "a number", "a text"
TEXTS, LIST, BOOL_TEXT = "a list of texts", "a list", "true, false or a text"
READ = "read"

_DETERMINISTIC = "deterministic kernels may need memory of their own, which is not predicted"
_GATHERS_FP8 = "weights are gathered in fp8: the FSDP buffers are smaller than predicted"
_FP8_WEIGHT_AGAIN = "fp8 weights are made again in the backward pass, which is not predicted"
_NO_EARLY_STOP = "a block is repeated to its end, whose last results are not predicted"


@dataclass(frozen=True)
class Key:
    """What one key holds, when there was one, and what it means to a prediction (see above)."""

    kind: str
    use: str = ""
    only: tuple[Any, ...] = ()
    remark: str = ""
    since: str = ""
    until: str = ""


KEYS: dict[str, Key] = {
    "activation_checkpoint.debug": Key(BOOL, since="2025-10-29"),
    "activation_checkpoint.determinism_check": Key(TEXT, since="2025-10-29"),
    "activation_checkpoint.early_stop": Key(
        BOOL, only=(True,), remark=_NO_EARLY_STOP, since="2025-08-29"
    ),
    "activation_checkpoint.memory_budget": Key(NUMBER, since="2025-10-09"),
    "activation_checkpoint.mode": Key(TEXT, use=READ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Key(
        TEXTS, only=([], ["moe.router.gate"]), since="2025-07-16"
    ),
    "activation_checkpoint.preserve_rng_state": Key(BOOL, since="2025-10-29"),
    "activation_checkpoint.selective_ac_option": Key(TEXT, use=READ),
    "activation_checkpoint.visualize_memory_budget_pareto": Key(BOOL, since="2025-10-09"),
    "checkpoint.async_mode": Key(TEXT),
    "checkpoint.create_seed_checkpoint": Key(BOOL),
    "checkpoint.enable": Key(BOOL, since="2025-08-22"),
    "checkpoint.enable_checkpoint": Key(BOOL, until="2025-08-21"),
    "checkpoint.enable_first_step_checkpoint": Key(BOOL, since="2025-06-17"),
    "checkpoint.enable_ft_dataloader_checkpoints": Key(BOOL, since="2025-10-12"),
    "checkpoint.exclude_from_loading": Key(TEXTS, since="2025-02-06"),
    "checkpoint.export_dtype": Key(TEXT),
    "checkpoint.folder": Key(TEXT),
    "checkpoint.initial_load_in_hf": Key(BOOL, since="2025-07-28"),
    "checkpoint.initial_load_in_hf_quantized": Key(BOOL, since="2025-10-08"),
    "checkpoint.initial_load_model_only": Key(BOOL, since="2025-07-20"),
    "checkpoint.initial_load_model_weights_only": Key(BOOL, since="2025-06-13", until="2025-07-18"),
    "checkpoint.initial_load_path": Key(TEXT, since="2025-06-13"),
    "checkpoint.interval": Key(INT),
    "checkpoint.interval_type": Key(TEXT, until="2025-02-27"),
    "checkpoint.keep_latest_k": Key(INT),
    "checkpoint.last_save_in_hf": Key(BOOL, since="2025-07-20"),
    "checkpoint.last_save_in_safetensors_format": Key(BOOL, since="2025-07-14", until="2025-07-18"),
    "checkpoint.last_save_model_only": Key(BOOL, since="2025-07-20"),
    "checkpoint.last_save_model_weights_only": Key(BOOL, since="2025-06-13", until="2025-07-18"),
    "checkpoint.load_only": Key(BOOL, since="2025-10-05"),
    "checkpoint.load_step": Key(INT, since="2024-12-05"),
    "checkpoint.model_weights_only": Key(BOOL_TEXT, until="2025-06-11"),
    "comm.init_timeout_seconds": Key(INT),
    "comm.mode": Key(TEXT, only=("default", "fake_backend"), since="2025-11-25"),
    "comm.save_traces_file_prefix": Key(TEXT, since="2025-09-23"),
    "comm.save_traces_folder": Key(TEXT, since="2025-07-23"),
    "comm.trace_buf_size": Key(INT),
    "comm.train_timeout_seconds": Key(INT),
    "compile.backend": Key(TEXT, only=("inductor",), since="2025-10-02"),
    "compile.components": Key(TEXTS, use=READ, since="2025-08-20"),
    "compile.enable": Key(BOOL, use=READ, since="2025-08-20"),
    "debug.deterministic": Key(BOOL, only=(False,), remark=_DETERMINISTIC, since="2025-10-29"),
    "debug.deterministic_warn_only": Key(BOOL, since="2025-10-29"),
    "debug.moe_force_load_balance": Key(BOOL, since="2025-10-29"),
    "debug.seed": Key(INT, since="2025-10-29"),
    "estimate.memory": Key(BOOL, until="2024-06-26"),
    "estimate.mode": Key(TEXT, until="2024-06-26"),
    "experimental.context_parallel_degree": Key(
        INT, only=(1,), since="2024-10-22", until="2025-03-14"
    ),
    "experimental.context_parallel_rotate_method": Key(
        TEXT, since="2024-12-11", until="2025-03-14"
    ),
    "experimental.custom_args_module": Key(TEXT, only=("",), since="2025-03-20"),
    "experimental.custom_import": Key(TEXT, only=("",), since="2025-03-19"),
    "experimental.custom_model_path": Key(TEXT, only=("",), since="2025-02-12", until="2025-03-19"),
    "experimental.enable_async_tensor_parallel": Key(BOOL, until="2025-03-14"),
    "experimental.enable_compiled_autograd": Key(
        BOOL, only=(False,), since="2024-07-18", until="2025-03-14"
    ),
    "experimental.pipeline_parallel_degree": Key(INT, only=(1,), until="2025-03-14"),
    "experimental.pipeline_parallel_microbatches": Key(INT, until="2025-03-14"),
    "experimental.pipeline_parallel_schedule": Key(TEXT, until="2025-03-14"),
    "experimental.pipeline_parallel_schedule_csv": Key(
        TEXT, since="2024-11-19", until="2025-03-14"
    ),
    "experimental.pipeline_parallel_split_mode": Key(TEXT, until="2024-08-19"),
    "experimental.pipeline_parallel_split_points": Key(TEXTS, until="2025-03-14"),
    "experimental.torch_spmd": Key(BOOL, only=(False,), since="2024-09-07", until="2024-09-07"),
    "fault_tolerance.enable": Key(BOOL, only=(False,), since="2025-02-28"),
    "fault_tolerance.fragment_sync_delay": Key(INT, since="2025-06-16", until="2025-08-05"),
    "fault_tolerance.fragment_update_alpha": Key(NUMBER, since="2025-06-16", until="2025-08-05"),
    "fault_tolerance.group_size": Key(INT, since="2025-02-28"),
    "fault_tolerance.min_replica_size": Key(INT, since="2025-02-28"),
    "fault_tolerance.module_fqns_per_model_fragment": Key(
        LIST, since="2025-08-05", until="2025-08-05"
    ),
    "fault_tolerance.num_fragments": Key(INT, since="2025-08-05", until="2025-08-05"),
    "fault_tolerance.process_group": Key(TEXT, since="2025-07-18"),
    "fault_tolerance.process_group_timeout_ms": Key(INT, since="2025-07-18"),
    "fault_tolerance.replica_id": Key(INT, since="2025-02-28"),
    "fault_tolerance.semi_sync_method": Key(TEXT, since="2025-04-29"),
    "fault_tolerance.should_quantize": Key(BOOL, since="2025-06-16", until="2025-08-05"),
    "fault_tolerance.sync_steps": Key(INT, since="2025-04-29", until="2025-08-05"),
    "float8.emulate": Key(BOOL, only=(False,), since="2025-05-28", until="2025-09-23"),
    "float8.enable_float8_linear": Key(BOOL, use=READ, since="2024-07-30", until="2025-02-12"),
    "float8.enable_fsdp_float8_all_gather": Key(
        BOOL, only=(False,), remark=_GATHERS_FP8, since="2024-07-30", until="2025-09-23"
    ),
    "float8.filter_fqns": Key(TEXTS, use=READ, since="2025-04-07", until="2025-09-23"),
    "float8.force_recompute_fp8_weight_in_bwd": Key(
        BOOL, only=(False,), remark=_FP8_WEIGHT_AGAIN, since="2025-02-18", until="2025-07-24"
    ),
    "float8.moe_fqns_prototype": Key(TEXTS, since="2025-06-27", until="2025-09-23"),
    "float8.precompute_float8_dynamic_scale_for_fsdp": Key(
        BOOL, since="2024-07-30", until="2025-09-23"
    ),
    "float8.recipe_name": Key(TEXT, use=READ, since="2025-02-27", until="2025-09-23"),
    "float8.scaling_type_grad_output": Key(
        TEXT, only=("dynamic",), since="2024-07-30", until="2024-12-20"
    ),
    "float8.scaling_type_input": Key(
        TEXT, only=("dynamic",), since="2024-07-30", until="2024-12-20"
    ),
    "float8.scaling_type_weight": Key(
        TEXT, only=("dynamic",), since="2024-07-30", until="2024-12-20"
    ),
    "job.config_file": Key(TEXT),
    "job.custom_config_module": Key(TEXT, only=("",), since="2025-10-14"),
    "job.description": Key(TEXT),
    "job.dump_folder": Key(TEXT),
    "job.print_args": Key(BOOL, since="2024-12-20", until="2025-10-13"),
    "job.print_config": Key(BOOL, since="2025-10-14"),
    "job.save_config_file": Key(TEXT, since="2025-10-21"),
    "job.save_config_folder": Key(TEXT, since="2025-10-21", until="2025-10-21"),
    "job.use_for_integration_test": Key(BOOL, until="2025-08-29"),
    "lr_scheduler.decay_ratio": Key(NUMBER, since="2025-03-11"),
    "lr_scheduler.decay_type": Key(TEXT, since="2025-03-11"),
    "lr_scheduler.lr_min": Key(NUMBER, since="2025-03-11", until="2025-07-29"),
    "lr_scheduler.min_lr_factor": Key(NUMBER, since="2025-07-30"),
    "lr_scheduler.total_steps": Key(INT, since="2026-02-06"),
    "lr_scheduler.warmup_steps": Key(INT, since="2025-03-11"),
    "memory_estimation.disable_fake_mode": Key(BOOL, since="2024-07-01"),
    "memory_estimation.enable": Key(BOOL, since="2025-08-20"),
    "memory_estimation.enabled": Key(BOOL, since="2024-07-01", until="2025-08-13"),
    "metrics.disable_color_printing": Key(BOOL, since="2024-12-20"),
    "metrics.disable_logging_from_checkpoint": Key(BOOL, since="2025-03-05", until="2025-03-05"),
    "metrics.enable_color_printing": Key(BOOL, until="2024-12-19"),
    "metrics.enable_tensorboard": Key(BOOL),
    "metrics.enable_wandb": Key(BOOL, since="2024-12-03"),
    "metrics.log_freq": Key(INT),
    "metrics.rank_0_only": Key(BOOL, until="2025-03-18"),
    "metrics.save_for_all_ranks": Key(BOOL, since="2025-03-19"),
    "metrics.save_tb_folder": Key(TEXT),
    "model.attn_mask_type": Key(TEXT, use=READ, since="2025-04-03", until="2025-04-15"),
    "model.converters": Key(TEXTS, use=READ, since="2025-02-15"),
    "model.flavor": Key(TEXT, use=READ),
    "model.hf_assets_path": Key(TEXT, since="2025-08-11"),
    "model.name": Key(TEXT, use=READ),
    "model.norm_type": Key(TEXT, only=("rmsnorm", "fused_rmsnorm"), until="2025-04-18"),
    "model.print_after_conversion": Key(BOOL, since="2025-02-27"),
    "model.tokenizer_path": Key(TEXT),
    "model.use_flex_attn": Key(BOOL, use=READ, since="2025-03-20", until="2025-04-15"),
    "mx.filter_fqns": Key(TEXTS, since="2025-05-14", until="2025-09-23"),
    "mx.moe_fqns_prototype": Key(TEXTS, since="2025-07-31", until="2025-09-23"),
    "mx.mxfp8_dim1_cast_kernel_choice": Key(TEXT, since="2025-07-24", until="2025-09-23"),
    "mx.recipe_name": Key(TEXT, since="2025-05-14", until="2025-09-23"),
    "mx.use_fp8_dim1_cast_triton_kernel": Key(BOOL, since="2025-05-14", until="2025-07-23"),
    "optimizer.beta1": Key(NUMBER, since="2025-06-11"),
    "optimizer.beta2": Key(NUMBER, since="2025-06-11"),
    "optimizer.early_step_in_backward": Key(BOOL, use=READ, since="2024-12-09"),
    "optimizer.eps": Key(NUMBER, since="2025-03-04"),
    "optimizer.fused": Key(BOOL, use=READ, until="2025-02-24"),
    "optimizer.implementation": Key(TEXT, use=READ, since="2025-02-24"),
    "optimizer.lr": Key(NUMBER),
    "optimizer.name": Key(TEXT, use=READ),
    "optimizer.weight_decay": Key(NUMBER, since="2025-06-11"),
    "parallelism.context_parallel_degree": Key(INT, only=(1,), since="2025-03-18"),
    "parallelism.context_parallel_load_balancer": Key(TEXT, since="2026-01-20"),
    "parallelism.context_parallel_rotate_method": Key(TEXT, since="2025-03-18"),
    "parallelism.data_parallel_replicate_degree": Key(INT, use=READ, since="2025-03-18"),
    "parallelism.data_parallel_shard_degree": Key(INT, use=READ, since="2025-03-18"),
    "parallelism.disable_loss_parallel": Key(BOOL, since="2025-03-18"),
    "parallelism.enable_async_tensor_parallel": Key(BOOL, since="2025-03-18"),
    "parallelism.enable_compiled_autograd": Key(
        BOOL, only=(False,), since="2025-03-18", until="2025-10-24"
    ),
    "parallelism.expert_parallel_comm_backend": Key(TEXT, since="2025-12-17"),
    "parallelism.expert_parallel_degree": Key(INT, only=(1,), since="2025-07-08"),
    "parallelism.expert_tensor_parallel_degree": Key(INT, only=(1,), since="2025-08-13"),
    "parallelism.fsdp_reshard_after_forward": Key(TEXT, use=READ, since="2025-03-18"),
    "parallelism.module_fqns_per_model_part": Key(LIST, since="2025-07-30"),
    "parallelism.pipeline_parallel_degree": Key(INT, only=(1,), since="2025-03-18"),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Key(BOOL, since="2025-12-12"),
    "parallelism.pipeline_parallel_first_stage_less_layers": Key(INT, since="2025-07-30"),
    "parallelism.pipeline_parallel_last_stage_less_layers": Key(INT, since="2025-07-30"),
    "parallelism.pipeline_parallel_layers_per_stage": Key(INT, since="2025-04-07"),
    "parallelism.pipeline_parallel_microbatch_size": Key(INT, since="2025-04-07"),
    "parallelism.pipeline_parallel_microbatches": Key(INT, since="2025-03-18", until="2025-04-07"),
    "parallelism.pipeline_parallel_schedule": Key(TEXT, since="2025-03-18"),
    "parallelism.pipeline_parallel_schedule_csv": Key(TEXT, since="2025-03-18"),
    "parallelism.pipeline_parallel_split_points": Key(
        TEXTS, since="2025-03-18", until="2025-10-12"
    ),
    "parallelism.tensor_parallel_degree": Key(INT, only=(1,), since="2025-03-18"),
    "profiling.enable_memory_snapshot": Key(BOOL),
    "profiling.enable_profiling": Key(BOOL),
    "profiling.profile_every_x_iter": Key(INT, until="2024-04-12"),
    "profiling.profile_freq": Key(INT),
    "profiling.profiler_active": Key(INT, since="2025-10-08"),
    "profiling.profiler_warmup": Key(INT, since="2025-10-08"),
    "profiling.run_profiler": Key(BOOL, until="2024-04-15"),
    "profiling.save_memory_snapshot_folder": Key(TEXT),
    "profiling.save_traces_folder": Key(TEXT),
    "quantize.dense.float8.emulate": Key(
        BOOL, only=(False,), since="2025-09-26", until="2025-09-26"
    ),
    "quantize.dense.float8.enable_fsdp_float8_all_gather": Key(
        BOOL, only=(False,), remark=_GATHERS_FP8, since="2025-09-26", until="2025-09-26"
    ),
    "quantize.dense.float8.filter_fqns": Key(
        TEXTS, use=READ, since="2025-09-26", until="2025-09-26"
    ),
    "quantize.dense.float8.precompute_float8_dynamic_scale_for_fsdp": Key(
        BOOL, since="2025-09-26", until="2025-09-26"
    ),
    "quantize.dense.float8.recipe_name": Key(
        TEXT, use=READ, since="2025-09-26", until="2025-09-26"
    ),
    "quantize.dense.mx.filter_fqns": Key(TEXTS, since="2025-09-26", until="2025-09-26"),
    "quantize.dense.mx.mxfp8_dim1_cast_kernel_choice": Key(
        TEXT, since="2025-09-26", until="2025-09-26"
    ),
    "quantize.dense.mx.recipe_name": Key(TEXT, since="2025-09-26", until="2025-09-26"),
    "quantize.grouped_mm.float8.fqns": Key(TEXTS, since="2025-09-30"),
    "quantize.grouped_mm.mx.fqns": Key(TEXTS, since="2025-09-30"),
    "quantize.grouped_mm.mx.recipe_name": Key(TEXT, since="2025-09-30"),
    "quantize.linear.float8.emulate": Key(BOOL, only=(False,), since="2025-09-30"),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": Key(
        BOOL, only=(False,), remark=_GATHERS_FP8, since="2025-09-30"
    ),
    "quantize.linear.float8.filter_fqns": Key(TEXTS, use=READ, since="2025-09-30"),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": Key(
        BOOL, since="2025-09-30"
    ),
    "quantize.linear.float8.recipe_name": Key(TEXT, use=READ, since="2025-09-30"),
    "quantize.linear.mx.filter_fqns": Key(TEXTS, since="2025-09-30"),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": Key(TEXT, since="2025-09-30"),
    "quantize.linear.mx.recipe_name": Key(TEXT, since="2025-09-30"),
    "quantize.moe.float8.fqns": Key(TEXTS, since="2025-09-26", until="2025-09-26"),
    "quantize.moe.mx.fqns": Key(TEXTS, since="2025-09-26", until="2025-09-26"),
    "training.batch_size": Key(INT, use=READ, until="2025-05-30"),
    "training.compile": Key(BOOL, use=READ, until="2025-08-13"),
    "training.data_parallel_degree": Key(INT, use=READ, until="2024-09-07"),
    "training.data_parallel_replicate_degree": Key(
        INT, use=READ, since="2024-09-10", until="2025-03-14"
    ),
    "training.data_parallel_shard_degree": Key(
        INT, use=READ, since="2024-09-10", until="2025-03-14"
    ),
    "training.data_parallel_type": Key(TEXT, use=READ, since="2024-07-18", until="2024-09-07"),
    "training.dataloader.num_workers": Key(INT, since="2025-12-18"),
    "training.dataloader.persistent_workers": Key(BOOL, since="2025-12-18"),
    "training.dataloader.pin_memory": Key(BOOL, since="2025-12-18"),
    "training.dataloader.prefetch_factor": Key(INT, since="2025-12-18"),
    "training.dataset": Key(TEXT),
    "training.dataset_path": Key(TEXT),
    "training.debug_moe_force_load_balance": Key(BOOL, since="2025-10-03", until="2025-10-28"),
    "training.deterministic": Key(
        BOOL, only=(False,), remark=_DETERMINISTIC, since="2024-12-09", until="2025-10-28"
    ),
    "training.disable_loss_parallel": Key(BOOL, since="2024-12-20", until="2025-03-14"),
    "training.dtype": Key(TEXT, use=READ, since="2025-09-16"),
    "training.enable_cpu_offload": Key(BOOL, use=READ, since="2024-10-28"),
    "training.enable_float8_linear": Key(BOOL, use=READ, since="2024-07-17", until="2024-07-30"),
    "training.enable_fp8_linear": Key(BOOL, use=READ, since="2024-07-16", until="2024-07-16"),
    "training.enable_fsdp_float8_all_gather": Key(
        BOOL, only=(False,), remark=_GATHERS_FP8, since="2024-07-17", until="2024-07-30"
    ),
    "training.enable_fsdp_fp8_all_gather": Key(
        BOOL, only=(False,), remark=_GATHERS_FP8, since="2024-07-16", until="2024-07-16"
    ),
    "training.enable_loss_parallel": Key(BOOL, until="2024-12-19"),
    "training.float8_scaling_type_grad_output": Key(
        TEXT, only=("dynamic",), since="2024-07-30", until="2024-07-30"
    ),
    "training.float8_scaling_type_input": Key(
        TEXT, only=("dynamic",), since="2024-07-30", until="2024-07-30"
    ),
    "training.float8_scaling_type_weight": Key(
        TEXT, only=("dynamic",), since="2024-07-30", until="2024-07-30"
    ),
    "training.fp8_linear": Key(BOOL_TEXT, use=READ, until="2024-07-10"),
    "training.fsdp_reshard_after_forward": Key(
        TEXT, use=READ, since="2025-02-06", until="2025-03-14"
    ),
    "training.gc_debug": Key(BOOL, since="2025-05-28"),
    "training.gc_freq": Key(INT),
    "training.global_batch_size": Key(INT, use=READ, since="2025-06-05"),
    "training.local_batch_size": Key(INT, use=READ, since="2025-06-05"),
    "training.max_norm": Key(NUMBER),
    "training.mixed_precision_param": Key(TEXT, use=READ),
    "training.mixed_precision_reduce": Key(TEXT, only=("float32",)),
    "training.pipeline_parallel_degree": Key(INT, only=(1,), until="2024-05-20"),
    "training.precompute_float8_dynamic_scale_for_fsdp": Key(
        BOOL, since="2024-07-16", until="2024-07-30"
    ),
    "training.seed": Key(INT, since="2024-10-01", until="2025-10-28"),
    "training.seq_len": Key(INT, use=READ),
    "training.steps": Key(INT),
    "training.tensor_parallel_degree": Key(INT, only=(1,), until="2025-03-14"),
    "training.warmup_steps": Key(INT, until="2025-03-10"),
    "validation.dataloader.num_workers": Key(INT, since="2025-12-18"),
    "validation.dataloader.persistent_workers": Key(BOOL, since="2025-12-18"),
    "validation.dataloader.pin_memory": Key(BOOL, since="2025-12-18"),
    "validation.dataloader.prefetch_factor": Key(INT, since="2025-12-18"),
    "validation.dataset": Key(TEXT, since="2025-07-09"),
    "validation.dataset_path": Key(TEXT, since="2025-07-09"),
    "validation.enable": Key(BOOL, use=READ, since="2025-08-22"),
    "validation.enabled": Key(BOOL, use=READ, since="2025-07-09", until="2025-08-21"),
    "validation.freq": Key(INT, since="2025-07-09"),
    "validation.local_batch_size": Key(INT, use=READ, since="2025-07-09"),
    "validation.seq_len": Key(INT, use=READ, since="2025-07-09"),
    "validation.steps": Key(INT, since="2025-07-09"),
}

TEST_TOKENIZER = 2256  # words of the one that its debug model had
_LLAMA3 = PRESETS["llama3-8b"]


def _llama2(n_layers: int, d_model: int, n_heads: int, d_ff: int, **more: int) -> dict[str, Any]:
    names = ("n_layers", "d_model", "n_heads", "d_ff")
    shape = dict(zip(names, (n_layers, d_model, n_heads, d_ff), strict=True))
    return {"vocab_size": 32_000, "rope_theta": 1e4, "n_kv_heads": n_heads} | shape | more


# The width of its MLPs follows from factors there; the results are here.
FLAVORS: dict[str, dict[str, dict[str, Any]]] = {
    "llama3": {
        "debugmodel": _LLAMA3 | _llama2(6, 256, 16, 768, vocab_size=2048),
        "8B": {"preset": "llama3-8b"} | _LLAMA3,
        "70B": _LLAMA3 | {"n_layers": 80, "d_model": 8192, "n_heads": 64, "d_ff": 28_672},
        "405B": _LLAMA3 | {"n_layers": 126, "d_model": 16_384, "n_heads": 128, "d_ff": 53_248},
    },
    "llama2": {
        "debugmodel": _llama2(8, 256, 16, 768, vocab_size=TEST_TOKENIZER),
        "271M": _llama2(16, 1024, 8, 2816),
        "1B": _llama2(18, 2048, 16, 5632),
        "7B": {"preset": "llama2-7b"} | PRESETS["llama2-7b"],
        "13B": _llama2(40, 5120, 40, 13_824),
        "26B": _llama2(80, 5120, 40, 13_824),
        "70B": _llama2(80, 8192, 64, 28_672, n_kv_heads=8),
    },
}
