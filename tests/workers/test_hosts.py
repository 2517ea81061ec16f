"""What a rank finds out about its host, and what is said when hosts differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from configs.errors import UserError
from configs.schema import RunConfig
from workers.hosts import Question, differences, report
from workers.network import own_network, refuse_spread_engines
from workers.placed_files import local_files
from workers.rendezvous import open_rendezvous

QUESTION = Question(paths={"actor.path": "/nowhere/model"}, variables={"a.options.key": "UNSET_KEY"}, probe="/nowhere")


def test_each_difference_is_one_line_with_a_remedy() -> None:
    here = report(QUESTION)
    assert not here.sees_probe and here.missing == ("actor.path",) and here.unset == ("a.options.key",)
    other = replace(here, code="0123", versions={**here.versions, "torch": "1.0"}, folder="/")
    lines = list(differences("tcp://b:1", other, QUESTION, unseen="unseen; share it"))
    first_words = [line.partition(" ")[0] for line in lines]
    assert first_words == ["worker", "worker", "unseen;", "actor.path:", "a.options.key:"]
    assert lines[0].startswith("worker tcp://b:1 runs other code of hybridflow (0123) than this machine")
    assert "has torch 1.0, this machine" in lines[1]
    assert all("; " in line and "\n" not in line for line in lines)
    fine = replace(here, sees_probe=True, missing=(), unset=())
    assert list(differences("tcp://b:1", fine, QUESTION, unseen="unseen; share it")) == []


def test_the_network_is_that_of_the_worker_or_what_is_told() -> None:
    loopback = own_network(None, "tls://127.0.0.1:5")
    assert loopback.host == "127.0.0.1" and own_network(None, "tcp://127.0.0.9:5").interface == loopback.interface
    assert own_network(loopback.interface, "tcp://10.9.9.9:5") == loopback == own_network("127.0.0.0/8", "tcp://x:5")
    with pytest.raises(UserError, match=r"cluster.interface=nope0: .* has none such; it has .*127\.0\.0\.1"):
        own_network("nope0", "tcp://127.0.0.1:5")


def test_a_rendezvous_port_that_is_taken_is_one_line() -> None:
    store = open_rendezvous(None, 0, "tcp://127.0.0.1:5")
    with pytest.raises(UserError, match=rf"^cluster.rendezvous_port={store.port}: cannot listen on 127.0.0.1:"):
        open_rendezvous(None, store.port, "tcp://127.0.0.1:5")


def test_an_engine_does_not_span_hosts() -> None:
    config = RunConfig.model_validate({
        "rollout": {"engine": "sglang", "tensor_parallel_size": 2}, "resources": {"num_ranks": 2},
    })  # fmt: skip
    refuse_spread_engines(config, ["tcp://a:1", "tcp://a:2"])
    with pytest.raises(UserError, match=r"rollout.tensor_parallel_size: 2, .* are on 2 hosts \(a, b\)"):
        refuse_spread_engines(config, ["tcp://a:1", "tcp://b:2"])


def test_what_each_host_has_to_have() -> None:
    config = RunConfig.model_validate({
        "actor": {"path": "/models/a"}, "reward": {"path": "org/name"}, "tokenizer": "checkpoint:/runs/x@3/actor",
        "data": {"train": {"path": "./rows.jsonl"}}, "plugins": ["mine.py", "package.module"],
        "rewards": {"functions": [{"path": "score.py:f"}, {"path": "length"}]},
    })  # fmt: skip
    assert local_files(config) == {
        "actor.path": "/models/a", "tokenizer": "/runs/x", "data.train.path": "./rows.jsonl", "plugins.0": "./mine.py",
        "rewards.functions.0": "./score.py",
    }  # fmt: skip
