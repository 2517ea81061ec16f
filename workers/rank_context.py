"""What a rank actor holds: device, process group, models, engine, data and reward functions."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from configs.errors import UserError
from configs.evaluation import with_held_out
from configs.schema import CostsConfig, RewardsConfig, RunConfig
from pipeline.placement import needs_model, pool_sizes
from pipeline.rollouts import Array
from storage.earlier_runs import read_seen
from storage.locations import Location, local_side, location
from storage.rollout_store import RolloutStore
from workers.data_plane import DataPlane
from workers.data_source import PairSource, PromptSource, SequenceSource
from workers.device import choose_device
from workers.engine_link import EngineLink
from workers.environments.pool import EnvironmentPool
from workers.hf import load_tokenizer, stop_token_ids
from workers.kept_tokenizer import keep_vocabulary
from workers.memory import CacheReleaser
from workers.network import own_network
from workers.pretraining import PretrainingSource
from workers.process_group import Joined, join
from workers.prompt_limits import check_prompts
from workers.prompt_rows import HistoryReader
from workers.rendezvous import TCPStore
from workers.residency import Residency
from workers.rewards import RewardFunctions, default_processes
from workers.role_model import RoleModel
from workers.turn_tokens import TurnTokens

if TYPE_CHECKING:
    from workers.rank_actor import RankSpec


class RankContext:
    """One rank's things. Built by `build_context` on the actor's own thread."""

    def __init__(
        self,
        *,
        config: RunConfig,
        device: torch.device,
        joined: Joined,
        mesh: DeviceMesh,
        plane: DataPlane,
        models: dict[str, RoleModel],
        roles: tuple[str, ...],
        run_dir: Location,
        global_rank: int,
    ) -> None:
        self.config, self.device, self.mesh, self.plane = config, device, mesh, plane
        self.joined = joined
        self.group = joined.pool
        """Ranks of the stage that is running."""
        self.models, self.roles = models, roles
        self.run_dir, self.global_rank = run_dir, global_rank
        self._evaluation_prompts: dict[str, PromptSource] = {}
        self.residency = Residency(models, device=device)
        self.cache_releaser = CacheReleaser(device)

    def use_group(self, *, spans_pools: bool) -> None:
        """What `group` is for the next stage: this rank's pool, or all pools of its process group."""
        self.group = self.joined.everyone if spans_pools else self.joined.pool

    def model(self, role: str) -> RoleModel:
        """The role's model, with its weights on the device. Raises UserError when it is not here."""
        if role not in self.models:
            raise UserError(f"{role} has no model on this rank: set {role}.path")
        self.residency.ensure(role)
        return self.models[role]

    @cached_property
    def tokenizer(self) -> Any:
        tokenizer = load_tokenizer(self.config)
        keep_vocabulary(tokenizer, self.run_dir)
        return tokenizer

    @cached_property
    def prompts(self) -> PromptSource:
        source = PromptSource(self.config, self.tokenizer, split="train", seen=read_seen(self.run_dir))
        return self._checked(source)

    def _checked(self, source: PromptSource) -> PromptSource:
        """The prompts, which the actor (where it is on this rank) can take."""
        if "actor" in self.models:
            hf = self.models["actor"].model.hf
            check_prompts(
                source,
                positions=getattr(hf.config.get_text_config(), "max_position_embeddings", None),
                vocabulary=hf.config.get_text_config().vocab_size,
                max_new_tokens=self.config.rollout.max_new_tokens,
            )
        return source

    def evaluation_prompts(self, name: str) -> PromptSource:
        """A held-out data set (`configs.evaluation.held_out`); read at its first use."""
        if name not in self._evaluation_prompts:
            config = with_held_out(self.config, name)
            self._evaluation_prompts[name] = self._checked(PromptSource(config, self.tokenizer, split="validation"))
        return self._evaluation_prompts[name]

    @cached_property
    def sequences(self) -> SequenceSource:
        return SequenceSource(self.config, self.tokenizer, split="train")

    @cached_property
    def validation_sequences(self) -> SequenceSource:
        return SequenceSource(self.config, self.tokenizer, split="validation")

    @cached_property
    def pairs(self) -> PairSource:
        return PairSource(self.config, self.tokenizer, split="train")

    @cached_property
    def safety_pairs(self) -> PairSource:
        return PairSource(self.config, self.tokenizer, split="train", labelled=True)

    @cached_property
    def validation_safety_pairs(self) -> PairSource:
        return PairSource(self.config, self.tokenizer, split="validation", labelled=True)

    @cached_property
    def validation_pairs(self) -> PairSource:
        return PairSource(self.config, self.tokenizer, split="validation")

    @cached_property
    def engines(self) -> EngineLink:
        """The rollout engines, beside the actor or on ranks of their own."""
        return EngineLink(
            self.config,
            self.model("actor") if "actor" in self.models else None,
            group=self.joined.everyone,
            num_sources=len(self.joined.mesh_ranks),
            device=self.device,
            run_dir=local_side(self.run_dir),
            rank=self.global_rank,
        )

    @cached_property
    def reward_functions(self) -> RewardFunctions:
        return self._functions(self.config.rewards, "rewards")

    @cached_property
    def cost_functions(self) -> RewardFunctions:
        return self._functions(self.config.costs, "costs")

    def _functions(self, section: RewardsConfig | CostsConfig, key: str) -> RewardFunctions:
        processes = section.num_processes or default_processes(sum(pool_sizes(self.config).values()))
        return RewardFunctions(section.functions, num_processes=processes, place=f"{key}.functions")

    @cached_property
    def pretraining(self) -> PretrainingSource:
        return PretrainingSource(self.config, self.tokenizer)

    @cached_property
    def environments(self) -> EnvironmentPool:
        """The processes that play this rank's episodes. Raises UserError where none is configured."""
        if self.config.rollout.environment is None:
            raise UserError("rollout.environment: not set; name the class to play")
        return EnvironmentPool(self.config.rollout.environment)

    @cached_property
    def store(self) -> RolloutStore:
        """What earlier iterations have committed."""
        return RolloutStore(self.run_dir / "rollouts")

    @cached_property
    def history(self) -> HistoryReader:
        """What earlier iterations say about each prompt."""
        return HistoryReader(self.store, self.prompts.row_numbers)

    @cached_property
    def turn_tokens(self) -> TurnTokens:
        """What stands between two actions of an episode."""
        environment, data = self.config.rollout.environment, self.config.data
        role = "user" if environment is None else environment.observation_role
        return TurnTokens(self.tokenizer, chat=data.apply_chat_template or data.messages_column is not None, role=role)

    @cached_property
    def max_positions(self) -> int:
        """Tokens of the longest sequence that the actor can take."""
        return int(self.engines.model_config.get_text_config().max_position_embeddings)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        return stop_token_ids(self.config, self.tokenizer)

    def decode(self, token_ids: Array) -> str:
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def close(self) -> None:
        if "engines" in self.__dict__:
            self.engines.close()
        if "environments" in self.__dict__:
            self.environments.close()
        if "reward_functions" in self.__dict__:
            self.reward_functions.close()
        if "cost_functions" in self.__dict__:
            self.cost_functions.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def build_context(spec: RankSpec, plane: DataPlane, *, store: TCPStore | None) -> RankContext:
    """Join the pool and build the roles that are placed on it."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config = spec.config
    device = choose_device(config, local_rank=spec.global_rank)
    if spec.rendezvous is None:
        raise ValueError("a rank needs its pool's rendezvous")
    wanted = config.cluster.interface
    own_network(wanted, plane.address).use(told=wanted is not None)
    joined = join(
        device=device,
        rank=spec.pool_rank,
        sizes=spec.pool_sizes or (spec.pool_size,),
        number=spec.pool_number,
        rendezvous=spec.rendezvous,
        own=store,
        timeout_s=config.cluster.call_timeout_s,
    )
    mesh = DeviceMesh(device.type, list(joined.mesh_ranks), mesh_dim_names=("dp",))
    models = {
        role: RoleModel.build(
            role,
            config,
            mesh,
            device,
            trained=role in spec.trained,
            updates_per_iteration=spec.updates.get(role, 1),
        )
        for role in spec.roles
        if needs_model(config, role)
    }
    return RankContext(
        config=config,
        device=device,
        joined=joined,
        mesh=mesh,
        plane=plane,
        models=models,
        roles=spec.roles,
        run_dir=location(spec.run_dir),
        global_rank=spec.global_rank,
    )
