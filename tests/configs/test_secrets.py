"""Secrets: references are resolved at use; as text they are refused, and in no message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError, UserError
from configs.loader import load_config
from configs.secrets import is_secret_key, masked, masked_override, references, resolved_options
from tests.configs.trees import write_good

SECRET = "hunter2hunter2"
LITERALS = {
    "api_key": (f"rewards.functions.0.options.api_key={SECRET}", "holds a secret"),
    "nested": (f"rewards.functions.0.options={{headers: {{Authorization: '{SECRET}'}}}}", "holds a secret"),
    "data set": (f"data.train.options.token={SECRET}", "holds a secret"),
    "URL": (f"rewards.functions.0.options.url=https://me:{SECRET}@host/", "holds a URL with a password"),
    "elsewhere": (f"data.train.path=https://me:{SECRET}@host/rows", "holds a URL with a password"),
    "token by its look": (f"rewards.functions.0.options.how=sk-{SECRET}{SECRET}", "holds an access token"),
    "unknown key": (f"rewards.api_key={SECRET}", "unknown key"),
    "unknown section": (f"judge={{api_key: {SECRET}}}", "unknown key"),
    "wrong type": (f"rewards.functions.0.options=[{{password: {SECRET}}}]", "not valid"),
    "no mapping": (f"rewards.functions.0.name={{secret: {SECRET}}}", "not valid"),
}


@pytest.mark.parametrize("case", LITERALS)
def test_a_secret_as_text_is_refused_and_not_repeated(case: str, tmp_path: Path) -> None:
    override, problem = LITERALS[case]
    with pytest.raises(ConfigError) as error:
        load_config(str(write_good(tmp_path)), ["rewards.functions=[{path: length}]", override])
    assert problem in str(error.value) and SECRET not in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_reference_is_resolved_where_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"api_key": "env:MY_KEY", "headers": {"x": ["env:MY_KEY", "env: no"]}, "scale": 2}
    override = "rewards.functions=[{path: length, options: {api_key: 'env:MY_KEY'}}]"
    config = load_config(str(write_good(tmp_path)), [override])
    assert references(config) == {"rewards.functions.0.options.api_key": "MY_KEY"}
    with pytest.raises(UserError, match=r"^api_key: env:MY_KEY: the environment variable MY_KEY is not set here"):
        resolved_options(options)
    with pytest.raises(UserError, match=r"^headers\.x\.1: env:MY_KEY: "):
        resolved_options({"headers": {"x": ["a", "env:MY_KEY"]}})
    monkeypatch.setenv("MY_KEY", SECRET)
    assert resolved_options(options) == {"api_key": SECRET, "headers": {"x": [SECRET, "env: no"]}, "scale": 2}
    assert SECRET not in masked(f"no such key: {SECRET}")
    assert options["api_key"] == "env:MY_KEY"


def test_names_of_secrets() -> None:
    secret = "api_key OPENAI_API_KEY token hf_token password x-api-key Authorization client_secret access_key"
    others = "max_tokens eos_token stop_token tokenizer token_env key keys secretary api_key_env"
    assert [key for key in secret.split() if not is_secret_key(key)] == []
    assert [key for key in others.split() if is_secret_key(key)] == []
    assert masked_override("a.lr=1e-6") == "a.lr=1e-6" and masked_override("a.api_key=env:X") == "a.api_key=env:X"
