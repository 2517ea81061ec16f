from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from configs.errors import UserError
from configs.schema import RunConfig
from storage.checkpoints import CheckpointStore
from storage.run_directory import RunDirectory
from tests.bombs import bomb
from tests.models import tiny_config, tiny_model_dir
from tests.workers.reference import (
    build,
    grouped_rollouts,
    max_difference,
    padded_log_probs,
    padded_scalar,
    padded_values,
    run_config,
)
from workers.checkpoint_io import export_checkpoint
from workers.hf import load_tokenizer
from workers.role_model import RoleModel

ROLLOUTS = grouped_rollouts([4, 3], [[2, 5], [6, 1]])


def trained(folder: Path, role: str, loss: str) -> tuple[RunConfig, RoleModel]:
    section = {"optimizer": {"lr": 1e-2}}
    config = run_config(folder, algorithm="reward_model", kl={"placement": "none"}, **{role: section})
    model = build(role, config)
    model.update([ROLLOUTS], loss, seed=0)
    return config, model


def committed_run(parent: Path, config: RunConfig, models: dict[str, RoleModel]) -> RunDirectory:
    run = RunDirectory.create(config, parent)
    store = CheckpointStore(run.checkpoints)
    aside = store.begin(1)
    for role, model in models.items():
        model.save(aside / role)
    store.commit(1, {})
    return run


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_exported_actor_is_what_transformers_loads(tmp_path: Path, family: str) -> None:
    config, actor = trained(tiny_model_dir(tmp_path, family), "actor", "clipped")
    actor.save(tmp_path / "checkpoint" / "actor")
    out = export_checkpoint(tmp_path / "checkpoint", "actor", config, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        log_probs, _ = padded_log_probs(loaded.eval(), ROLLOUTS)
    if family != "gemma2":  # transformers' default attention leaves out the soft cap
        np.testing.assert_allclose(actor.compute_log_prob(ROLLOUTS)["log_probs"], log_probs, atol=1e-5)
    assert max_difference(dict(loaded.named_parameters()), actor.full_state()) == 0
    assert AutoTokenizer.from_pretrained(out)("a+1").input_ids == load_tokenizer(config)("a+1").input_ids


@pytest.mark.parametrize(("own", "ends"), [(False, 5), (True, 7)])
def test_an_export_ends_where_the_run_does(tmp_path: Path, own: bool, ends: int) -> None:
    """With a generation config of its own the model says so itself; without, it would end at Llama's defaults."""
    folder = tiny_model_dir(tmp_path)
    settings = tiny_config(pad_token_id=None, eos_token_id=2, bos_token_id=1)
    if own:
        GenerationConfig(eos_token_id=7, pad_token_id=8, bos_token_id=9).save_pretrained(folder)
    config = run_config(folder, rollout={"stop_token_ids": [5]}, actor={} if own else {"path": None, "init": settings})
    build("actor", config.model_copy(update={"tokenizer": str(folder)})).save(tmp_path / "checkpoint" / "actor")
    config = config.model_copy(update={"tokenizer": str(folder)})
    out = export_checkpoint(tmp_path / "checkpoint", "actor", config, tmp_path / "out")
    said = GenerationConfig.from_pretrained(out)
    assert (said.eos_token_id, said.pad_token_id, said.bos_token_id) == (ends, 8 if own else 0, 9 if own else 2)
    model = AutoConfig.from_pretrained(out)
    assert (model.eos_token_id, model.pad_token_id, model.bos_token_id) == ((1 if own else 5), 0, 2)


def test_an_exported_reward_model_gives_the_same_scores(tmp_path: Path) -> None:
    config, reward = trained(tiny_model_dir(tmp_path, scalar=True), "reward", "bradley_terry")
    reward.save(tmp_path / "checkpoint" / "reward")
    out = export_checkpoint(tmp_path / "checkpoint", "reward", config, tmp_path / "out")
    scores = reward.compute_scores(ROLLOUTS)
    with torch.no_grad():
        _, expected = padded_values(padded_scalar(out), ROLLOUTS)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    model = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
    ids = torch.from_numpy(ROLLOUTS["token_ids"][: ROLLOUTS.offsets[1]].astype(np.int64))[None]
    assert model(input_ids=ids).logits.item() == pytest.approx(float(scores[0]), abs=1e-5)


def test_a_loaded_role_continues_bit_for_bit(tmp_path: Path) -> None:
    config, first = trained(tiny_model_dir(tmp_path), "actor", "clipped")
    first.save(tmp_path / "actor")
    second = build("actor", config)
    second.load(tmp_path / "actor")
    assert second.version == first.version == 1
    for model in (first, second):
        model.update([ROLLOUTS], "clipped", seed=1)
    assert max_difference(first.full_state(), second.full_state()) == 0


def test_a_run_is_the_starting_point_of_another(tmp_path: Path) -> None:
    config, actor = trained(tiny_model_dir(tmp_path), "actor", "clipped")
    run = committed_run(tmp_path, config, {"actor": actor})
    for path in (f"checkpoint:{run.path}", f"checkpoint:{run.path}/actor"):
        following = RunConfig.model_validate({"actor": {"path": path}})
        assert max_difference(build("actor", following).full_state(), actor.full_state()) == 0
        assert max_difference(build("reference", following).full_state(), actor.full_state()) == 0
        assert len(load_tokenizer(following)) == len(load_tokenizer(config))


def test_a_critic_takes_the_backbone_of_a_run_and_starts_at_zero(tmp_path: Path) -> None:
    config, actor = trained(tiny_model_dir(tmp_path), "actor", "clipped")
    run = committed_run(tmp_path, config, {"actor": actor})
    critic = build("critic", RunConfig.model_validate({"actor": {"path": f"checkpoint:{run.path}"}}))
    states = critic.full_state()
    assert not states["score.weight"].any()
    assert torch.equal(states["model.norm.weight"], actor.full_state()["model.norm.weight"])


def test_a_reward_model_of_a_run_keeps_its_head(tmp_path: Path) -> None:
    config, reward = trained(tiny_model_dir(tmp_path, scalar=True), "reward", "bradley_terry")
    run = committed_run(tmp_path, config, {"reward": reward})
    following = RunConfig.model_validate({"reward": {"path": f"checkpoint:{run.path}"}})
    np.testing.assert_array_equal(build("reward", following).compute_scores(ROLLOUTS), reward.compute_scores(ROLLOUTS))


def test_what_cannot_be_exported_is_one_line(tmp_path: Path) -> None:
    config, actor = trained(tiny_model_dir(tmp_path), "actor", "clipped")
    actor.save(tmp_path / "checkpoint" / "actor")
    with pytest.raises(UserError, match="holds no critic; it has actor"):
        export_checkpoint(tmp_path / "checkpoint", "critic", config, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(UserError, match="not empty"):
        export_checkpoint(tmp_path / "checkpoint", "actor", config, tmp_path / "full")
    with pytest.raises(UserError, match="no checkpoint"):
        actor.load(tmp_path / "nowhere")


def test_a_run_without_a_fitting_checkpoint_is_one_line(tmp_path: Path) -> None:
    config, reward = trained(tiny_model_dir(tmp_path, scalar=True), "reward", "bradley_terry")
    run = committed_run(tmp_path, config, {"reward": reward})
    for path, problem in (
        (f"checkpoint:{run.path}", "holds none of actor"),
        (f"checkpoint:{run.path}/reward", "no language model"),
    ):
        with pytest.raises(UserError, match=problem):
            build("actor", RunConfig.model_validate({"actor": {"path": path}}))


def test_what_is_written_is_what_was_copied_not_what_training_made_of_it(tmp_path: Path) -> None:
    config, actor = trained(tiny_model_dir(tmp_path), "actor", "clipped")
    before = actor.full_state()
    write = actor.saving(tmp_path / "actor", actor.mesh.get_group())
    actor.update([ROLLOUTS], "clipped", seed=1)
    assert max_difference(before, actor.full_state()) > 0
    write()
    loaded = build("actor", config)
    loaded.load(tmp_path / "actor")
    assert loaded.version == 1 and max_difference(before, loaded.full_state()) == 0
    for model in (loaded, actor):  # the moments too: the next update is the same
        model.load(tmp_path / "actor")
        model.update([ROLLOUTS], "clipped", seed=2)
    assert max_difference(loaded.full_state(), actor.full_state()) == 0


def test_a_writer_that_cannot_write_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, actor = trained(tiny_model_dir(tmp_path), "actor", "clipped")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="cannot write .*file.*nothing committed is lost"):
        actor.saving(tmp_path / "file" / "actor", actor.mesh.get_group())()


SERVED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""What an inference server needs of a model directory."""


@pytest.mark.filterwarnings("error:torch.distributed is disabled")
def test_an_export_has_what_an_inference_server_reads(tmp_path: Path) -> None:
    from safetensors import safe_open

    config, actor = trained(tiny_model_dir(tmp_path), "actor", "clipped")
    actor.save(tmp_path / "checkpoint" / "actor")
    out = export_checkpoint(tmp_path / "checkpoint", "actor", config, tmp_path / "out", dtype="bfloat16")
    assert {path.name for path in out.iterdir()} >= set(SERVED)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(out / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_an_exports_files_have_what_the_umask_gives(tmp_path: Path, umask: int) -> None:
    config, actor = trained(tiny_model_dir(tmp_path), "actor", "clipped")
    actor.save(tmp_path / "checkpoint" / "actor")
    before = os.umask(umask)
    try:
        out = export_checkpoint(tmp_path / "checkpoint", "actor", config, tmp_path / "out")
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in out.iterdir()} == {
        path.name: oct(0o666 & ~umask) for path in out.iterdir()
    }


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "both"])
def test_a_pickle_in_a_checkpoint_is_not_run(tmp_path: Path, name: str) -> None:
    """both: the index says that a tensor is stored as bytes, which DCP would unpickle."""
    config, actor = trained(tiny_model_dir(tmp_path), "actor", "clipped")
    folder = tmp_path / "checkpoint" / "actor"
    actor.save(folder)
    pickled = bomb(tmp_path / "exploded")
    if name == "both":
        index = pickle.loads((folder / ".metadata").read_bytes())
        index.state_dict_metadata = dict.fromkeys(index.state_dict_metadata, BytesStorageMetadata())
        place = _StorageInfo("__0_0.distcp", 0, len(pickled))
        index.storage_data = {MetadataIndex(tensor): place for tensor in index.state_dict_metadata}
        (folder / ".metadata").write_bytes(pickle.dumps(index))
    (folder / ("__0_0.distcp" if name == "both" else name)).write_bytes(pickled)
    with pytest.raises(BaseException):  # noqa: B017 - DCP's own is no Exception
        export_checkpoint(tmp_path / "checkpoint", "actor", config, tmp_path / "out")
    assert not (tmp_path / "exploded").exists()
