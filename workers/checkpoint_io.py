"""A role's checkpoint: torch DCP shards and the model's configuration; any number of ranks reads it.

ROLE/*.distcp, .metadata    model/NAME, exp_avg/NAME, exp_avg_sq/NAME, progress
ROLE/config.json            the Hugging Face configuration, with the architecture's name
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from configs.errors import UserError
from configs.schema import ROLES, RunConfig
from storage.atomic import filled_folder, give_usual_modes, writing
from storage.errors import StorageError
from storage.locations import Location, as_folder, location
from workers.checkpoint_reader import SafeReader
from workers.hf import Kind, empty_model, load_tokenizer, quiet, special_ids
from workers.optimizer import Optimizer, Progress, local

PROGRESS = "progress"


def role_state(parameters: Mapping[str, Tensor], optimizer: Optimizer | None, progress: Progress) -> dict[str, Any]:
    """The flat state that is saved: the tensors (or shards) themselves, so that loading is in place."""
    state: dict[str, Any] = {f"model/{name}": tensor for name, tensor in parameters.items()}
    if optimizer is not None:
        for moment, tensors in optimizer.moments().items():
            state |= {f"{moment}/{name}": tensor for name, tensor in tensors.items()}
    state[PROGRESS] = torch.tensor(dataclasses.astuple(progress), dtype=torch.int64)
    return state


def save_role(path: Location, state: dict[str, Any], model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Write the shards (collective over `group`), and the configuration on its first rank.

    Raises StorageError when a rank cannot write.
    """
    try:
        # To an object store each rank sends the files that it has written.
        with writing(path), filled_folder(path) as folder:
            if dist.get_rank(group) == 0:
                save_config(folder, model)
            dcp_save(state, checkpoint_id=folder, process_group=group, planner=WithoutEmptyShards())
    except CheckpointException as error:  # no Exception, but what the ranks' writers have met
        rank, (cause, _) = next(iter(error.failures.items()))
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise StorageError(
            f"cannot write the checkpoint {path} (rank {rank}: {reason}); free space or mend the permissions, "
            "then resume: nothing committed is lost"
        ) from error


def host_copy(state: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors (or shards) copied to the host's memory; later changes do not reach the copy."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}


class WithoutEmptyShards(DefaultSavePlanner):
    """Leaves out shards without elements.

    A parameter shorter than the ranks (a score head of one row) leaves some of them an empty shard. DCP
    tells shards apart by their offset, which an empty one shares with its neighbour, and may then drop the
    neighbour's data as a duplicate.
    """

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[item for item in plan.items if not _is_empty(item)])
        return self.plan


def _is_empty(item: WriteItem) -> bool:
    return item.tensor_data is not None and 0 in item.tensor_data.chunk.sizes and 0 not in item.tensor_data.size


def load_role(path: Location, state: dict[str, Any], group: dist.ProcessGroup) -> Progress:
    """Read into the state's tensors (collective). Returns the counters.

    Raises UserError when `path` is no checkpoint of such a role.
    """
    if not (path / ".metadata").exists():
        raise UserError(f"{path} is no checkpoint: no .metadata; see `hybridflow checkpoints ls`")
    dcp_load(state, storage_reader=SafeReader(path), process_group=group)
    names = [field.name for field in dataclasses.fields(Progress)]
    return Progress(**dict(zip(names, state[PROGRESS].tolist(), strict=True)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A tensor of a checkpoint that differs in `num_different` of this rank's entries, by at most `largest`."""

    name: str
    num_different: int
    largest: float


def differing_tensors(path: Location, state: dict[str, Any], group: dist.ProcessGroup) -> list[TensorDifference]:
    """Where the state's tensors (or shards) are not, bit for bit, those that `path` holds (collective).

    Takes a second copy of the state, in the host's memory. Raises UserError when `path` holds no such role.
    """
    stored = host_copy(state)
    load_role(path, stored, group)
    found = (_difference(name, local(stored[name]), local(tensor).cpu()) for name, tensor in state.items())
    return [difference for difference in found if difference is not None]


def _difference(name: str, stored: Tensor, ours: Tensor) -> TensorDifference | None:
    theirs, mine = (tensor.contiguous().flatten() for tensor in (stored, ours))
    bits = (theirs.view(torch.uint8) != mine.view(torch.uint8)).view(len(mine), -1) if len(mine) else torch.zeros(0, 1)
    entries = bits.any(dim=1)
    if not entries.any():
        return None
    gap = (theirs.double() - mine.double()).abs()[entries]
    return TensorDifference(name=name, num_different=int(entries.sum()), largest=float(gap.max()))


def save_config(path: Path, model: PreTrainedModel) -> None:
    """config.json, naming the architecture, and generation_config.json where there is one."""
    path.mkdir(parents=True, exist_ok=True)
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    config.save_pretrained(path)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(path)


def read_model(path: Location, *, trust_remote_code: bool = False) -> tuple[PreTrainedModel, Kind]:
    """The whole model of a role's checkpoint, float32 on the host, in one process without a group."""
    if not (path / "config.json").exists():
        raise UserError(f"{path} holds no config.json; give a role of a committed checkpoint")
    with as_folder(path, "*.json") as folder:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    kind = kind_of(config)
    model = empty_model(config, kind, trust_remote_code=trust_remote_code)
    state: dict[str, Any] = {f"model/{name}": p.data for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        # DCP says that it loads in one process, which is what `no_dist` asks for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        dcp_load(state, storage_reader=SafeReader(path), no_dist=True)
    return model, kind


def kind_of(config: PretrainedConfig) -> Kind:
    """By the name of the architecture that `config` was saved with."""
    names = config.architectures or []
    return "scalar" if any(name.endswith("ForSequenceClassification") for name in names) else "causal_lm"


def export_checkpoint(
    checkpoint_dir: Location | str, role: str, config: RunConfig, dest: Path | str, *, dtype: str = "float32"
) -> Path:
    """Write a committed checkpoint's role as a Hugging Face directory, tokenizer included; returns `dest`.

    dtype: float32 (what was trained) or bfloat16 (half the size, what an inference server computes in anyway).
    Needs neither cluster nor process group. A scalar model loads as AutoModelForSequenceClassification.
    Raises UserError when the checkpoint does not hold the role, or `dest` holds something.
    """
    checkpoint, dest = location(checkpoint_dir), Path(dest)
    source = checkpoint / role
    if not source.is_dir():
        there = [r for r in ROLES if (checkpoint / r).is_dir()]
        raise UserError(f"{checkpoint_dir} holds no {role}; it has {', '.join(there) or 'no role'}")
    if dest.exists() and any(dest.iterdir()):
        raise UserError(f"{dest} is not empty; give a new directory")
    trust = any(getattr(config, r).trust_remote_code for r in ROLES)
    model, kind = read_model(source, trust_remote_code=trust)
    if kind == "causal_lm" and (source / "generation_config.json").exists():
        from transformers import GenerationConfig

        with as_folder(source, "*.json") as folder:
            model.generation_config = GenerationConfig.from_pretrained(folder)
    model.to({"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
    tokenizer = load_tokenizer(config)
    generation = model.generation_config if model.can_generate() else None
    if generation is None or generation._from_model_config:
        _give_ids(model, special_ids(config, tokenizer))
    with quiet():
        model.save_pretrained(dest)
    give_usual_modes(dest)
    tokenizer.save_pretrained(dest)
    return dest


def _give_ids(model: PreTrainedModel, ids: Mapping[str, Any]) -> None:
    """What the run stopped at, in place of the defaults of the architecture. A generation config of a pretrained
    model's own says better where it stops."""
    for name, value in ids.items():
        setattr(model.config, name, value)
        if model.can_generate() and model.generation_config is not None:
            setattr(model.generation_config, name, value)
