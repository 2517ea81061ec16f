"""What a rollout engine cannot be given, and what it makes nothing of.

Arguments that a user hands to SGLang's: those that this project decides are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from configs.machine_checks import is_on_cpu
from configs.schema import RolloutConfig, RunConfig
from configs.section import ROLES
from configs.sglang_source import engine_argument_names

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
OF_SGLANG = (
    "weights_transport", "verify_weights", "memory_fraction", "weights_bucket_mib", "start_timeout_s",
    "request_timeout_s",
)  # fmt: skip
"""Settings in `rollout` of which the Torch engine reads none."""


def tensor_parallel_problems(config: RunConfig) -> Iterator[str]:
    """Engines over several ranks need GPUs."""
    size = config.rollout.tensor_parallel_size
    if config.rollout.engine == "sglang" and size > 1 and is_on_cpu(config):
        yield f"rollout.tensor_parallel_size: {size} needs GPUs; SGLang runs on a CPU with 1 only, set it to 1"


def torch_engine_overrides(config: RunConfig) -> list[str]:
    """What makes a run of SGLang's engines one of the Torch engine; empty where it cannot be one, or is."""
    rollout, placement = config.rollout, {str(role): pool for role, pool in config.resources.placement.items()}
    apart = "rollout" in placement and placement["rollout"] != placement.get("actor")
    if rollout.engine == "torch" or apart:
        return []
    overrides = ["rollout.engine=torch"]
    if rollout.engine_arguments:
        overrides.append("rollout.engine_arguments={}")
    if rollout.tensor_parallel_size > 1:
        overrides.append("rollout.tensor_parallel_size=1")
    return overrides


def effect_warnings(config: RunConfig) -> Iterator[str]:
    """Settings that do nothing where the run is, or with its engine."""
    if is_on_cpu(config):
        for role in ROLES:
            if getattr(config, role).fsdp.compile:
                yield f"{role}.fsdp.compile: true has no effect on a CPU, where layers run eagerly; leave it out"
    if config.rollout.engine == "sglang":
        return
    engine, settings, defaults = config.rollout.engine, config.rollout.model_dump(), RolloutConfig().model_dump()
    for name in OF_SGLANG:
        if settings[name] != defaults[name]:
            value = str(settings[name]).lower()
            yield (
                f"rollout.{name}: {value} has no effect with rollout.engine {engine}, since it is SGLang's; leave it "
                "out, or use rollout.engine: sglang"
            )


def engine_argument_problems(config: RunConfig) -> Iterator[str]:
    """One line for each argument that cannot be given."""
    rollout, place = config.rollout, "rollout.engine_arguments"
    if rollout.engine_arguments and rollout.engine != "sglang":
        yield f"{place}: they are SGLang's, and rollout.engine is {rollout.engine}; remove them"
        return
    known = engine_argument_names() if rollout.engine_arguments and config.cluster.scheduler is None else frozenset()
    for name in rollout.engine_arguments:
        if name in HERE:
            yield f"{place}.{name}: is {HERE[name]} here; set that and remove this"
        elif name in OURS:
            yield f"{place}.{name}: the run decides it, since weights are written into the engine in place; remove it"
        elif name in OTHER_WEIGHTS:
            yield f"{place}.{name}: weights cannot be written in place into an engine with it; remove it"
        elif known and name not in known:
            close = get_close_matches(name, known, n=1)
            remedy = f"did you mean {close[0]}?" if close else "remove it, or take a name of its ServerArgs"
            yield f"{place}.{name}: the installed SGLang has no such argument; {remedy}"
