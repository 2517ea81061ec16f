"""One role's model on one rank: the SPMD program that a stage calls.

    rollouts -> micro-batches by tokens -> packed -> PackedModel (FSDP2) -> columns, or optimizer steps

Every method is collective over the role's mesh: all ranks call it in the same order, each with any
number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from configs.algorithms import TRAINED_SCORER
from configs.schema import RunConfig
from pipeline.losses import PAIR_LOSSES, get_loss
from pipeline.rollouts import Array, Rollouts, ranges
from storage.locations import Location
from workers import packed_model
from workers.checkpoint_io import TensorDifference, differing_tensors, host_copy, load_role, role_state, save_role
from workers.device import compute_dtype
from workers.optimizer import Optimizer, Progress, local
from workers.packed_model import PackedCausalLM, PackedModel, PackedScalar
from workers.packing import PackedBatch, pack
from workers.parameters import copy_full_parameters, whole_tensor
from workers.progress import STAGE
from workers.residency import HOST, PARTS, Part
from workers.role_sources import KINDS, load_role_model, model_config
from workers.update import MicroBatch, Updater, cut_micro_batches, gather, padded

Forward = Callable[[PackedBatch], dict[str, Tensor]]


class RoleModel:
    """Built by `build`. `version` counts the updates; `trained` says whether there is an optimizer."""

    def __init__(
        self,
        *,
        role: str,
        config: RunConfig,
        mesh: DeviceMesh,
        device: torch.device,
        model: PackedModel,
        optimizer: Optimizer | None,
    ) -> None:
        self.role, self.config, self.mesh, self.device = role, config, mesh, device
        self.model, self.optimizer = model, optimizer
        self._progress = Progress() if optimizer is None else optimizer.progress

    @classmethod
    def build(
        cls,
        role: str,
        config: RunConfig,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        trained: bool | None = None,
        updates_per_iteration: int = 1,
    ) -> RoleModel:
        """Load and shard the role's initial model (collective).

        trained: None: the actor and the critic are, and the reward model by `algorithm: reward_model`.
        updates_per_iteration: how often the algorithm updates the role, for the learning rate's schedule.
        Raises UserError when the configuration names no usable model.
        """
        trained = is_trained(role, config) if trained is None else trained
        section = model_config(role, config)
        dtype = compute_dtype(section.fsdp, device)
        hf = load_role_model(role, config, trained=trained, device=device)
        if not trained:
            _freeze(hf, dtype)
        if trained and section.fsdp.gradient_checkpointing:
            packed_model.checkpoint_layers(hf)
        compiled = section.fsdp.compile and device.type == "cuda"
        if compiled:
            packed_model.compile_layers(hf)
        chunk = config.training.log_prob_chunk_tokens
        causal = KINDS[role] == "causal_lm"
        model = PackedCausalLM(hf, chunk_tokens=chunk, fused=compiled) if causal else PackedScalar(hf)
        if mesh.size() == 1 and (not trained or dtype == torch.float32):
            model.to(device)  # nothing to shard, nothing to cast: FSDP would only copy
        else:
            tp_size = config.rollout.tensor_parallel_size if role == "actor" else 1
            packed_model.shard(model, section.fsdp, mesh, dtype, tensor_parallel_size=tp_size)
        optimizer = None
        if trained:
            names = {n: p for n, p in model.hf.named_parameters() if p.requires_grad}
            steps = config.training.num_iterations * updates_per_iteration * steps_of_update(config)
            optimizer = Optimizer(names, section.optimizer, total_steps=steps, mesh=mesh)
        return cls(role=role, config=config, mesh=mesh, device=device, model=model, optimizer=optimizer)

    @property
    def version(self) -> int:
        """Updates so far; that of the checkpoint after `load`."""
        return self._progress.version

    @property
    def trained(self) -> bool:
        return self.optimizer is not None

    def compute_log_prob(
        self, batch: Rollouts, *, temperature: float = 1.0, with_entropy: bool | None = None
    ) -> dict[str, Array]:
        """float32 [T] `log_probs` and `entropy` (None: the actor's only); 0 where nothing is predicted."""
        entropy_too = self.role == "actor" if with_entropy is None else with_entropy

        def forward(packed: PackedBatch) -> dict[str, Tensor]:
            log_probs, entropy = self.model(packed, temperature=temperature, with_entropy=entropy_too)
            columns = {"log_probs": packed.unpack(log_probs)}
            return columns if entropy is None else {**columns, "entropy": packed.unpack(entropy)}

        names = ("log_probs", "entropy") if entropy_too else ("log_probs",)
        return self._columns(batch, forward, dict.fromkeys(names, batch.num_tokens), by_row=False)

    def compute_values(self, batch: Rollouts) -> dict[str, Array]:
        """float32 [T] `values`: of the state before each response token, 0 elsewhere."""

        def forward(packed: PackedBatch) -> dict[str, Tensor]:
            return {"values": packed.unpack(self.model(packed)[0])}

        return self._columns(batch, forward, {"values": batch.num_tokens}, by_row=False)

    def compute_scores(self, batch: Rollouts) -> Array:
        """float32 [B]: the head's output at each row's last token."""

        def forward(packed: PackedBatch) -> dict[str, Tensor]:
            return {"scores": self.model(packed)[1]}

        return self._columns(batch, forward, {"scores": batch.num_rows}, by_row=True)["scores"]

    def update(
        self,
        mini_batches: Sequence[Rollouts],
        loss: str,
        *,
        seed: int,
        kl_coef: float | None = None,
        pretraining: Sequence[Rollouts] = (),
    ) -> dict[str, float]:
        """An optimizer step for each mini-batch, of which this rank passes its rows; `version` + 1.

        seed: for losses that draw random numbers. kl_coef: of a KL term in the loss, where it adapts; None: the
        configured one. pretraining: this rank's texts of each step, or empty: their likelihood, times
        loss.pretraining_coef, is learnt in the same step. Returns metrics equal on all ranks (see Updater.run).
        Raises TrainingDiverged, as the optimizer says, and ValueError for a role that is not trained.
        """
        if self.optimizer is None:
            raise ValueError(f"the {self.role} of this run is not trained")
        updater = Updater(
            model=self.model,
            optimizer=self.optimizer,
            loss=get_loss(loss),
            config=_with_kl_coef(self.config, kl_coef),
            mesh=self.mesh,
            device=self.device,
            sequence_level=get_loss(loss) in PAIR_LOSSES or self.role in ("reward", "cost"),
        )
        self.optimizer.progress.steps = self.version * steps_of_update(self.config)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            metrics = updater.run(mini_batches, pretraining)
        self.optimizer.progress.version += 1
        return metrics

    def save(self, path: Location) -> None:
        """Write weights, optimizer state and counters below `path`, which this makes (collective)."""
        save_role(path, self._state(), self.model.hf, self.mesh.get_group())

    def saving(self, path: Location, group: dist.ProcessGroup) -> Callable[[], None]:
        """Copy weights, optimizer state and counters to the host; what is returned writes the copy (collective).

        It may run on another thread while training goes on, with a group (gloo) that nothing else uses meanwhile.
        """
        state, hf = host_copy(self._state()), self.model.hf
        return lambda: save_role(path, state, hf, group)

    def load(self, path: Location) -> None:
        """Read what `save` wrote, on any number of ranks, in place (collective)."""
        progress = load_role(path, self._state(), self.mesh.get_group())
        self._progress = progress
        if self.optimizer is not None:
            self.optimizer.restore(progress)

    def differing_tensors(self, path: Location, group: dist.ProcessGroup) -> list[TensorDifference]:
        """Where weights, optimizer state and counters are not those that `save` wrote (collective over `group`)."""
        return differing_tensors(path, self._state(), group)

    def copy_full_parameters_into(self, weights: Mapping[str, Tensor] | None) -> None:
        """Copy every parameter, whole, into the tensors of these Hugging Face names (collective).

        None: this rank takes part only. Raises ValueError, on all ranks, that lists names which are
        unknown, missing or of another shape.
        """
        packed_model.reshard(self.model)
        copy_full_parameters(self.model.hf, weights, self.mesh, self.device)

    def reshard(self) -> None:
        """Free gathered parameters: `parameters()` are the shards again."""
        packed_model.reshard(self.model)

    def full_state(self) -> dict[str, Tensor]:
        """Whole parameters on the host, for comparison and tests (collective; the memory of a model)."""
        packed_model.reshard(self.model)
        return {name: whole_tensor(p).cpu().clone() for name, p in self.model.hf.named_parameters()}

    @property
    def offloads(self) -> bool:
        """`fsdp.offload` of the role."""
        return model_config(self.role, self.config).fsdp.offload

    def bytes_on(self, part: Part) -> dict[str, int]:
        """Bytes of this rank's shards of a part, by type of device."""
        sizes: dict[str, int] = {}
        for tensor in self._tensors(part):
            shard = local(tensor)
            sizes[shard.device.type] = sizes.get(shard.device.type, 0) + shard.nbytes
        return sizes

    def move(self, part: Part, device: torch.device) -> None:
        """Move a part's shards to a device; gradients go where the parameters go."""
        packed_model.reshard(self.model)
        if part == "optimizer" and self.optimizer is not None:
            self.optimizer.move(device)
        elif part == "parameters":
            self.model.to(device)

    def offload(self) -> None:
        """Everything to the host."""
        for part in PARTS:
            self.move(part, HOST)

    def onload(self) -> None:
        """Everything to the device."""
        for part in PARTS:
            self.move(part, self.device)

    def _tensors(self, part: Part) -> list[Tensor]:
        parameters = list(self.model.hf.parameters())
        if part == "parameters":
            return [p.detach() for p in parameters]
        if part == "gradients":
            return [p.grad for p in parameters if p.grad is not None]
        return [] if self.optimizer is None else self.optimizer.tensors()

    def _state(self) -> dict[str, object]:
        packed_model.reshard(self.model)
        parameters = {name: p.detach() for name, p in self.model.hf.named_parameters()}
        return role_state(parameters, self.optimizer, self._progress)

    def _columns(
        self, batch: Rollouts, forward: Forward, sizes: Mapping[str, int], *, by_row: bool
    ) -> dict[str, Array]:
        """Run the forward passes and put their outputs in the batch's order."""
        columns = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
        cut = cut_micro_batches(batch, self.config, split_groups=True)
        number = int(gather(np.array([len(cut)]), self.mesh, self.device).max())
        STAGE.begin(number)
        passes: list[tuple[MicroBatch, Mapping[str, Tensor]]] = []
        with torch.no_grad():
            for micro in padded(batch, cut, number):
                packed = pack(micro.rollouts, share_prompts=self.config.training.share_prompts, device=self.device)
                passes.append((micro, forward(packed)))
                STAGE.step()
        packed_model.reshard(self.model)
        for micro, outputs in passes:  # read at the end: a GPU has the next pass before it is done with this one
            if len(micro.rows):
                _scatter(columns, outputs, batch, micro, by_row=by_row)
        return columns


def steps_of_update(config: RunConfig) -> int:
    """Optimizer steps of a whole update; one of fewer groups than mini-batches makes fewer."""
    return config.training.num_epochs * config.training.num_mini_batches


def is_trained(role: str, config: RunConfig) -> bool:
    """Which roles the built-in algorithms update."""
    return role in ("actor", "critic", "cost_critic") or (role == TRAINED_SCORER.get(config.algorithm))


def _freeze(hf: torch.nn.Module, dtype: torch.dtype) -> None:
    """No gradients, and kept in the compute dtype; buffers (rotary frequencies) stay float32."""
    for parameter in hf.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)


def _scatter(
    columns: dict[str, Array], outputs: Mapping[str, Tensor], batch: Rollouts, micro: MicroBatch, *, by_row: bool
) -> None:
    index = micro.rows if by_row else ranges(batch.offsets[micro.rows], batch.lengths[micro.rows])
    for name, column in columns.items():
        column[index] = outputs[name].float().cpu().numpy()


def _with_kl_coef(config: RunConfig, coef: float | None) -> RunConfig:
    if coef is None or coef == config.kl.coef:
        return config
    return config.model_copy(update={"kl": config.kl.model_copy(update={"coef": coef})})
