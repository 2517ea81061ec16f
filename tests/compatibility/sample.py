"""A small rollout store and checkpoint with known contents, written under one set of versions, read under another.

    python -m tests.compatibility.sample write ARCHIVE.tar.gz
    python -m tests.compatibility.sample check ARCHIVE.tar.gz

The contents are functions of seeds that no version changes (NumPy's PCG64, arithmetic of small numbers), so that the
reader makes the expected values itself.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import RunConfig
from pipeline.rollouts import Rollouts, offsets_of
from storage.checkpoints import CheckpointStore
from storage.rollout_store import RolloutStore
from tests.storage.batches import assert_same
from tests.workers.reference import single_rank_mesh
from workers.role_model import RoleModel

MODEL = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
STEP, VERSION, STEPS = 3, 3, 6


def write(archive: Path) -> None:
    """Make the sample with the versions that are installed."""
    with tempfile.TemporaryDirectory() as folder:
        store = RolloutStore(Path(folder) / "rollouts")
        manifest = store.write(0, "actor.generate_sequences", _batch(), new_rows=True, attempt="1")
        store.commit(0, manifest, metrics={"response_length_mean": 1.5})
        actor, checkpoints = _actor(), CheckpointStore(Path(folder) / "checkpoints", keep_last=2)
        _fill(actor)
        actor.save(checkpoints.begin(STEP) / "actor")
        checkpoints.commit(STEP, {"iteration": STEP, "kl_coef": 0.125})
        (Path(folder) / "versions.json").write_text(json.dumps(versions()))
        with tarfile.open(archive, "w:gz") as tar:
            for part in ("rollouts", "checkpoints", "versions.json"):
                tar.add(Path(folder) / part, part)


def check(archive: Path) -> dict[str, str]:
    """Compare the sample with what it must be, bit for bit; returns the versions that wrote it."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        assert_same(RolloutStore(Path(folder) / "rollouts").read(0), _batch())
        newest = CheckpointStore(Path(folder) / "checkpoints", keep_last=2).latest()
        assert newest is not None and newest.step == STEP and newest.state["kl_coef"] == 0.125
        actor, expected = _actor(), _actor()
        actor.load(newest.path / "actor")
        _fill(expected)
        for name, tensor in _tensors(expected).items():
            assert torch.equal(_tensors(actor)[name], tensor), name
        assert actor.version == VERSION
        assert actor.optimizer is not None and actor.optimizer.progress.steps == STEPS
        written: dict[str, str] = json.loads((Path(folder) / "versions.json").read_text())
    return written


def versions() -> dict[str, str]:
    names = ("torch", "zarr", "numpy", "transformers")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def _batch() -> Rollouts:
    """Some columns of each kind."""
    draw = np.random.default_rng(7)
    lengths = np.array([5, 0, 17, 1])
    num_tokens = int(lengths.sum())
    return Rollouts(
        offsets=offsets_of(lengths),
        token_columns={
            "token_ids": draw.integers(0, 1000, num_tokens).astype(np.int32),
            "response_mask": draw.integers(0, 2, num_tokens).astype(np.uint8),
            "log_probs": (draw.integers(-640, 0, num_tokens) / 64).astype(np.float32),
        },
        sample_columns={
            "prompt_id": draw.integers(0, 2**40, 4),
            "group": np.arange(4, dtype=np.int32),
            "reward/exact_match": np.array([0, 1, 0.5, -1], dtype=np.float32),
            "text": np.array(["", "plain", "\u00fc\u2603\u6f22", "line\nbreak\x00"], dtype=object),
        },
    )


def _actor() -> RoleModel:
    config = RunConfig.model_validate({"algorithm": "grpo", "actor": {"init": MODEL}})
    return RoleModel.build("actor", config, single_rank_mesh(), torch.device("cpu"))


def _fill(actor: RoleModel) -> None:
    """Known parameters, moments and counters."""
    assert actor.optimizer is not None
    with torch.no_grad():
        for number, (_, tensor) in enumerate(sorted(_tensors(actor).items())):
            values = np.random.default_rng(number).integers(-64, 64, tuple(tensor.shape)) / 32
            tensor.copy_(torch.from_numpy(values.astype(np.float32)))
    actor.optimizer.progress.version, actor.optimizer.progress.steps = VERSION, STEPS


def _tensors(actor: RoleModel) -> dict[str, Tensor]:
    assert actor.optimizer is not None
    moments = {f"{m}/{n}": t for m, tensors in actor.optimizer.moments().items() for n, t in tensors.items()}
    return {**{f"model/{n}": p.detach() for n, p in actor.model.hf.named_parameters()}, **moments}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("archive", type=Path)
    options = parser.parse_args()
    if options.action == "write":
        write(options.archive)
        print(f"written under {versions()}")
    else:
        print(f"written under {check(options.archive)}, read under {versions()}: the same bits")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
