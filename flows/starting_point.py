"""Where a new run starts: from the last run's newest checkpoint, with the prompts that are new first."""

from __future__ import annotations

import logging
from dataclasses import replace

from configs.checkpoint_paths import CHECKPOINT, CheckpointPath, parse_checkpoint
from configs.errors import UserError
from configs.schema import ROLES, ModelConfig, RunConfig
from storage.earlier_runs import earlier_runs, newest_checkpoint, sampled_prompts, write_seen
from storage.locations import Location
from storage.run_directory import RunDirectory
from storage.run_needs import CHECKPOINT as CHECKPOINTS
from storage.run_needs import choose

logger = logging.getLogger(__name__)


def create_run(config: RunConfig, parent: Location, *, suffix: str | None = None) -> RunDirectory:
    """A run directory for this configuration, with what `initialize_from`, `checkpoint:RUN` and `data.seen_prompts`
    stand for written down: a resume finds the same, whatever runs have come since."""
    earlier = earlier_runs(config.name, parent)
    seen = sampled_prompts(earlier[-1]) if earlier and config.data.seen_prompts == "last" else frozenset()
    config = with_checkpoints_named(initialized(config, earlier), parent)
    directory = RunDirectory.create(config, parent, suffix=suffix)
    if seen:
        write_seen(directory.path, seen)
    return directory


def initialized(config: RunConfig, earlier: list[RunDirectory]) -> RunConfig:
    """The configuration with `initialize_from: latest` replaced by the checkpoint that it means."""
    if config.initialize_from is None:
        return config
    found = newest_checkpoint(earlier)
    if found is None:
        return config
    run, checkpoint = found
    logger.info("starting from step %d of %s", checkpoint.step, run.path.name)
    saved = [role for role in ROLES if (checkpoint.path / role).is_dir()]
    models: dict[str, ModelConfig] = {
        role: _from(getattr(config, role), CheckpointPath(run=str(run.path), step=checkpoint.step, role=role))
        for role in saved
    }
    if "actor" in models and config.reference.path is None and config.actor.init is None:
        # the anchor of the KL term stays where it was, or a year of runs would drift without a bound
        models["reference"] = config.actor.model_copy(update={"fsdp": config.reference.fsdp})
    tokenizer = config.tokenizer or next((m.path for m in (config.actor, config.reward) if m.path is not None), None)
    return config.model_copy(update={**models, "tokenizer": tokenizer})


def with_checkpoints_named(config: RunConfig, parent: Location) -> RunConfig:
    """The configuration with the run and step that each `checkpoint:RUN` means: the newest run that has one."""
    models: dict[str, ModelConfig] = {role: getattr(config, role) for role in ROLES}
    named = {
        role: model.model_copy(update={"path": _named(model.path, parent)})
        for role, model in models.items()
        if model.path is not None and model.path.startswith(CHECKPOINT)
    }
    return config.model_copy(update={**named, "tokenizer": config.tokenizer and _named(config.tokenizer, parent)})


def _named(path: str, parent: Location) -> str:
    """Raises UserError where no run of the name has a checkpoint."""
    if not path.startswith(CHECKPOINT):
        return path
    asked = parse_checkpoint(path)
    choice = choose(asked.run, parent, CHECKPOINTS)
    if choice.passed_over:
        logger.warning("%s: %s", path, choice.sentence(CHECKPOINTS))
    step = asked.step
    if step is None:
        found = newest_checkpoint([choice.run])
        if found is None:
            raise UserError(f"{path!r} has no committed checkpoint yet: {choice.run.path}")
        step = found[1].step
    return str(replace(asked, run=str(choice.run.path), step=step))


def _from(model: ModelConfig, path: CheckpointPath) -> ModelConfig:
    return model.model_copy(update={"path": str(path), "init": None, "revision": None})
