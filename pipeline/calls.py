"""The primitive calls of an RLHF iteration (the paper's Table 4) as one table.

A call belongs to a role, goes to that role's ranks by a transfer protocol, reads columns of the
rollouts and either adds columns (a *column* stage) or takes weights from one version to the next
(a *state* stage).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from configs.schema import RunConfig

Kind = Literal["column", "state"]


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """One row of the table.

    reads and writes name columns (`pipeline.rollouts`); a name ending in `?` is read where it
    exists. `new_rows` marks calls whose result has rows of its own, `generates` those that ask the rollout engines.
    `uses` names roles whose models the call needs
    on the same ranks, where there are any. `also_reads`: columns of further row sets, by the name of the argument
    that is given them, one or several. `reads_history`: the call reads what earlier iterations have committed. `reads_weights`: its
    result depends on the role's weights.
    """

    role: str
    method: str
    kind: Kind
    protocol: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    new_rows: bool = False
    generates: bool = False
    uses: tuple[str, ...] = ()
    reads_history: bool = False
    reads_weights: bool = True
    also_reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def site(self) -> str:
        """`role.method`, the call site's name."""
        return f"{self.role}.{self.method}"


GENERATED = (
    "token_ids", "response_mask", "rollout_log_probs", "policy_version",
    "prompt_id", "group", "sample", "prompt_length", "response_length",
    "finish_reason", "prompt_text", "text", "answer",
)  # fmt: skip
EPISODES = ("step", "step_reward", "step_group", "num_turns", "environment_reward", "environment_dropped")
"""What generation writes beside, with `rollout.environment`."""
OF_EPISODES = ("generate_sequences", "generate_round", "join_rounds", "generate_held_out", "replay_sequences")
"""Methods that write them."""
LOADED = (
    "token_ids",
    "response_mask",
    "prompt_id",
    "group",
    "sample",
    "prompt_length",
    "response_length",
    "prompt_text",
    "text",
)
SEQUENCES = ("token_ids", "response_mask", "group", "prompt_length")
POLICY_INPUTS = (
    *SEQUENCES,
    "advantages?", "rollout_log_probs?", "log_probs?", "ref_log_probs?", "loss_mask?", "reward_dropped?",
    "cost_dropped?",
)  # fmt: skip

HELD_OUT = (
    "prompt_id", "group", "sample", "prompt_text", "text", "answer", "finish_reason", "response_length",
)  # fmt: skip
"""What an evaluation keeps of a sample, beside the parts of its reward and what was extracted."""

REWARDED = (
    "response_mask", "group", "reward", "rollout_log_probs", "log_probs?", "ref_log_probs?", "values?",
    "reward_dropped?", "prompt_id?", "step?", "step_reward?", "step_group?", "finish_reason?",
)  # fmt: skip
ADVANTAGES = ("token_rewards", "advantages", "returns", "loss_mask")

CALLS: dict[str, ModelCall] = {
    call.site: call
    for call in (
        ModelCall(role="actor", method="generate_sequences", kind="column", protocol="3D_ALL_MICRO_DP",
                  writes=GENERATED, new_rows=True, generates=True),
        ModelCall(role="actor", method="generate_round", kind="column", protocol="3D_ALL_MICRO_DP",
                  writes=GENERATED, new_rows=True, generates=True, also_reads={"rounds": ("group", "varied")}),
        ModelCall(role="reward", method="score_round", kind="column", protocol="DP_PROTO",
                  reads=(*SEQUENCES, "prompt_text", "text", "answer", "environment_reward?", "environment_dropped?"),
                  writes=("reward", "reward_dropped", "varied")),
        ModelCall(role="actor", method="join_rounds", kind="column", protocol="ONE_TO_ALL",
                  writes=(*GENERATED, "reward", "reward_dropped"), new_rows=True, reads_weights=False,
                  also_reads={"rounds": (*GENERATED, *(f"{n}?" for n in EPISODES), "reward", "reward_dropped", "varied")}),
        ModelCall(role="actor", method="replay_sequences", kind="column", protocol="ONE_TO_ALL",
                  writes=(*GENERATED, "reward", "reward_dropped", "replayed_from"), new_rows=True, reads_history=True,
                  reads_weights=False),
        ModelCall(role="actor", method="load_sequences", kind="column", protocol="DP_PROTO", writes=LOADED, new_rows=True,
                  reads_weights=False),
        ModelCall(role="actor", method="load_pairs", kind="column", protocol="DP_PROTO", writes=LOADED, new_rows=True,
                  reads_weights=False),
        ModelCall(role="cost", method="load_pairs", kind="column", protocol="DP_PROTO", writes=(*LOADED, "is_safe"),
                  new_rows=True, reads_weights=False),
        ModelCall(role="cost", method="update_cost", kind="state", protocol="DP_PROTO", reads=(*SEQUENCES, "is_safe")),
        ModelCall(role="cost", method="evaluate", kind="column", protocol="DP_PROTO"),
        ModelCall(role="actor", method="evaluate_pairs", kind="column", protocol="DP_PROTO",
                  reads=(*SEQUENCES, "ref_log_probs")),
        ModelCall(role="actor", method="evaluate_sequences", kind="column", protocol="DP_PROTO"),
        ModelCall(role="reward", method="load_pairs", kind="column", protocol="DP_PROTO", writes=LOADED, new_rows=True,
                  reads_weights=False),
        ModelCall(role="actor", method="compute_log_prob", kind="column", protocol="DP_PROTO",
                  reads=SEQUENCES, writes=("log_probs", "entropy")),
        ModelCall(role="reference", method="compute_log_prob", kind="column", protocol="DP_PROTO",
                  reads=SEQUENCES, writes=("ref_log_probs",)),
        ModelCall(role="critic", method="compute_values", kind="column", protocol="DP_PROTO",
                  reads=SEQUENCES, writes=("values",)),
        ModelCall(role="reward", method="compute_reward", kind="column", protocol="DP_PROTO",
                  reads=(*SEQUENCES, "prompt_text", "text", "answer", "environment_reward?", "environment_dropped?"),
                  writes=("reward", "reward_dropped")),
        ModelCall(role="actor", method="compute_advantages", kind="column", protocol="ONE_TO_ALL",
                  reads=REWARDED, writes=ADVANTAGES, reads_weights=False,
                  also_reads={"baseline": ("group", "reward", "reward_dropped?")}),
        ModelCall(role="cost", method="compute_cost", kind="column", protocol="DP_PROTO",
                  reads=(*SEQUENCES, "prompt_text", "text", "answer"), writes=("cost", "cost_dropped")),
        ModelCall(role="cost_critic", method="compute_values", kind="column", protocol="DP_PROTO",
                  reads=SEQUENCES, writes=("cost_values",)),
        ModelCall(role="actor", method="compute_safe_advantages", kind="column", protocol="ONE_TO_ALL",
                  reads=(*REWARDED, "cost", "cost_values?", "cost_dropped?"),
                  writes=(*ADVANTAGES, "token_costs", "cost_returns"), reads_weights=False),
        ModelCall(role="actor", method="load_pretraining", kind="column", protocol="DP_PROTO", writes=LOADED,
                  new_rows=True, reads_weights=False),
        ModelCall(role="actor", method="update_actor", kind="state", protocol="DP_PROTO", reads=POLICY_INPUTS,
                  also_reads={"pretraining": SEQUENCES}),
        ModelCall(role="critic", method="update_critic", kind="state", protocol="DP_PROTO",
                  reads=(*SEQUENCES, "values", "returns", "loss_mask?", "reward_dropped?", "cost_dropped?")),
        ModelCall(role="cost_critic", method="update_critic", kind="state", protocol="DP_PROTO",
                  reads=(*SEQUENCES, "cost_values", "cost_returns", "loss_mask?", "reward_dropped?", "cost_dropped?")),
        ModelCall(role="actor", method="evaluate", kind="column", protocol="DP_PROTO", uses=("reward",),
                  generates=True),
        ModelCall(role="actor", method="generate_held_out", kind="column", protocol="3D_ALL_MICRO_DP",
                  writes=GENERATED, new_rows=True, generates=True),
        ModelCall(role="reward", method="score_held_out", kind="column", protocol="DP_PROTO",
                  reads=(*SEQUENCES, "prompt_text", "text", "answer", "environment_reward?", "environment_dropped?"),
                  writes=("reward", "reward_dropped", "extracted")),
        ModelCall(role="actor", method="estimate_held_out", kind="column", protocol="ONE_TO_ALL",
                  reads=(*HELD_OUT, "reward", "extracted")),
        ModelCall(role="reward", method="evaluate", kind="column", protocol="DP_PROTO"),
        ModelCall(role="reward", method="update_reward", kind="state", protocol="DP_PROTO", reads=SEQUENCES),
    )
}  # fmt: skip


def present_columns(reads: tuple[str, ...], present: Collection[str]) -> tuple[str, ...]:
    """The names of a row's `reads`, those with a `?` where they are present."""
    return tuple(name.rstrip("?") for name in reads if not name.endswith("?") or name[:-1] in present)


def also_read(call: ModelCall, argument: str, present: Collection[str]) -> tuple[str, ...]:
    """Columns of a further row set that a call reads; argument: its name, with a number where there are several."""
    return present_columns(call.also_reads[argument.partition(".")[0]], present)


def columns_written(call: ModelCall, config: RunConfig, row_set: str = "") -> tuple[str, ...]:
    """What a call writes under this configuration; row_set: where to."""
    written = call.writes
    if call.method in OF_EPISODES and config.rollout.environment is not None:
        written = (*written, *EPISODES)
    if draws_dynamically(call, config, row_set):
        written = (*written, "reward", "reward_dropped")
    return written


def draws_dynamically(call: ModelCall, config: RunConfig, row_set: str = "") -> bool:
    """Generation that scores, and replaces groups without variance: of the rows that are trained on."""
    return call.site == "actor.generate_sequences" and config.rollout.dynamic_sampling is not None and not row_set


def roles_used(call: ModelCall, config: RunConfig) -> tuple[str, ...]:
    """Roles whose models a call needs beside its own, under this configuration."""
    return (*call.uses, "reward") if draws_dynamically(call, config) else call.uses


def history_read(call: ModelCall, config: RunConfig) -> bool:
    """Whether a call reads what earlier iterations have committed."""
    draws = call.site in ("actor.generate_sequences", "actor.generate_round")
    return call.reads_history or (draws and config.data.sampler is not None)


def register_call(call: ModelCall) -> None:
    """Add a call of one's own; raises ValueError when the site is taken."""
    if call.site in CALLS:
        raise ValueError(f"the call {call.site} is registered already")
    CALLS[call.site] = call
