from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models import FAMILIES, tiny_model_dir
from tests.workers.reference import (
    build,
    grouped_rollouts,
    padded_causal,
    padded_log_probs,
    padded_scalar,
    padded_values,
    run_config,
)

ROLLOUTS = grouped_rollouts([9, 4, 1], [[3, 7, 1], [12], [2, 5]])


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_entropy_equal_the_padded_model(tmp_path: Path, family: str, share_prompts: bool) -> None:
    folder = tiny_model_dir(tmp_path, family)
    config = run_config(folder, training={"share_prompts": share_prompts})
    columns = build("actor", config).compute_log_prob(ROLLOUTS, temperature=0.7)
    with torch.no_grad():
        log_probs, entropy = padded_log_probs(padded_causal(folder), ROLLOUTS, 0.7)
    np.testing.assert_allclose(columns["log_probs"], log_probs, atol=1e-5)
    np.testing.assert_allclose(columns["entropy"], entropy, atol=1e-5)


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_scores_equal_the_padded_model(tmp_path: Path, family: str, share_prompts: bool) -> None:
    folder = tiny_model_dir(tmp_path, family, scalar=True)
    config = run_config(folder, training={"share_prompts": share_prompts})
    with torch.no_grad():
        values, scores = padded_values(padded_scalar(folder), ROLLOUTS)
    np.testing.assert_allclose(build("critic", config).compute_values(ROLLOUTS)["values"], values, atol=1e-5)
    np.testing.assert_allclose(build("reward", config).compute_scores(ROLLOUTS), scores, atol=1e-5)
