"""Arguments that a user hands to SGLang's engine: those that this project decides are refused by name."""

from __future__ import annotations

from collections.abc import Iterator

from configs.schema import RunConfig

HERE = {
    "tp_size": "rollout.tensor_parallel_size",
    "mem_fraction_static": "rollout.memory_fraction",
    "dtype": "actor.fsdp.param_dtype",
    "device": "resources.device",
    "random_seed": "seed",
    "enable_deterministic_inference": "deterministic",
}
"""With the setting of ours that decides it."""
OURS = (
    "model_path", "load_format", "skip_tokenizer_init", "tokenizer_path", "custom_weight_loader", "context_length",
    "enable_memory_saver", "base_gpu_id", "gpu_id_step", "nccl_port", "nnodes", "node_rank", "dist_init_addr",
)  # fmt: skip
"""The trainer's weights, in place, depend on these."""
OTHER_WEIGHTS = (
    "quantization", "enable_lora", "lora_paths", "speculative_algorithm", "dp_size", "pp_size", "ep_size",
    "enable_dp_attention", "cpu_offload_gb",
)  # fmt: skip
"""Engines with these hold other tensors than the reshard plan writes into."""


def engine_argument_problems(config: RunConfig) -> Iterator[str]:
    """One line for each argument that cannot be given."""
    rollout, place = config.rollout, "rollout.engine_arguments"
    if rollout.engine_arguments and rollout.engine != "sglang":
        yield f"{place}: they are SGLang's, and rollout.engine is {rollout.engine}; remove them"
        return
    for name in rollout.engine_arguments:
        if name in HERE:
            yield f"{place}.{name}: is {HERE[name]} here; set that and remove this"
        elif name in OURS:
            yield f"{place}.{name}: the run decides it, since weights are written into the engine in place; remove it"
        elif name in OTHER_WEIGHTS:
            yield f"{place}.{name}: weights cannot be written in place into an engine with it; remove it"
