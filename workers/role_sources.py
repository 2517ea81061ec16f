"""Where a role's first weights come from, by the configuration's rules."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from configs.checkpoint_paths import CHECKPOINT, parse_checkpoint
from configs.errors import UserError
from configs.schema import ModelConfig, RunConfig
from pipeline.random import seed_of
from storage.checkpoints import Checkpoint, CheckpointStore
from storage.run_directory import RunDirectory
from workers.checkpoint_io import read_model
from workers.hf import Kind, empty_model, load_model, score_head

HOST = torch.device("cpu")
KINDS: dict[str, Kind] = {
    "actor": "causal_lm",
    "reference": "causal_lm",
    "critic": "scalar",
    "reward": "scalar",
    "cost": "scalar",
    "cost_critic": "scalar",
}
"""What each role computes."""


def source_role(role: str, config: RunConfig) -> str:
    """The role whose `path` or `init` a role starts from: its own, else the reference from the actor's,
    the critics from the reward model's (the cost critic from the cost model's before it) or the actor's.
    Raises UserError when there is none."""
    candidates = {
        "reference": ("reference", "actor"),
        "critic": ("critic", "reward", "actor"),
        "cost_critic": ("cost_critic", "cost", "reward", "actor"),
    }
    for candidate in candidates.get(role, (role,)):
        model = model_config(candidate, config)
        if model.path is not None or model.init is not None:
            return candidate
    raise UserError(f"{role} has no model: set {role}.path or {role}.init")


def model_config(role: str, config: RunConfig) -> ModelConfig:
    section = getattr(config, role)
    assert isinstance(section, ModelConfig)
    return section


def load_role_model(
    role: str, config: RunConfig, *, trained: bool = False, device: torch.device = HOST
) -> PreTrainedModel:
    """The role's initial model, float32; the same on every rank.

    A score head that the files lack starts at zero where it will be trained; elsewhere that is a UserError.
    On the host, but for one from scratch, which is drawn on `device`: a CPU takes minutes for billions of
    random numbers.
    """
    origin = source_role(role, config)
    section, kind = model_config(origin, config), KINDS[role]
    borrowed_backbone = kind == "scalar" and origin != role
    new_head = trained or role == "critic"
    if section.init is None and section.path is not None and section.path.startswith(CHECKPOINT):
        model = _from_checkpoint(section, role, config, new_head=new_head)
        if borrowed_backbone:
            torch.nn.init.zeros_(score_head(model).weight)
        return model.eval()
    seed = seed_of(config.seed, "init", origin)
    return load_model(section, kind, seed=seed, zero_head=borrowed_backbone, new_head=new_head, device=device)


def _from_checkpoint(section: ModelConfig, role: str, config: RunConfig, *, new_head: bool) -> PreTrainedModel:
    assert section.path is not None
    named = parse_checkpoint(section.path)
    run = RunDirectory.resolve(named.run, config.output)
    store = CheckpointStore(run.checkpoints)
    checkpoint = store.latest() if named.step is None else _at_step(store, named.step)
    if checkpoint is None:
        which = "no committed checkpoint yet" if named.step is None else f"no checkpoint of step {named.step}"
        raise UserError(f"{role}.path: {section.path!r} has {which}")
    likely = ("actor",) if KINDS[role] == "causal_lm" else (role, "cost", "reward", "critic", "actor")
    wanted = (named.role,) if named.role else likely
    saved = next((w for w in wanted if (checkpoint.path / w).is_dir()), None)
    if saved is None:
        raise UserError(f"{role}.path: checkpoint {checkpoint.path} holds none of {', '.join(wanted)}")
    model, kind = read_model(checkpoint.path / saved, trust_remote_code=section.trust_remote_code)
    return _as_kind(model, kind, KINDS[role], f"{role}.path: {section.path!r}", new_head=new_head)


def _at_step(store: CheckpointStore, step: int) -> Checkpoint | None:
    return next((checkpoint for checkpoint in store.committed() if checkpoint.step == step), None)


def _as_kind(model: PreTrainedModel, kind: Kind, wanted: Kind, place: str, *, new_head: bool) -> PreTrainedModel:
    if kind == wanted:
        return model
    if wanted == "causal_lm":
        raise UserError(f"{place} is a model with one score, no language model; name an actor")
    if not new_head:
        raise UserError(f"{place} is a language model without a score head, and it is not trained; name a reward model")
    model.config.num_labels = 1
    scalar = empty_model(model.config, "scalar")
    scalar.base_model.load_state_dict(model.base_model.state_dict())
    torch.nn.init.zeros_(score_head(scalar).weight)
    return scalar
