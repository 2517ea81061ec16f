from __future__ import annotations

import pytest
import torch

from configs.errors import UserError
from configs.schema import FsdpConfig, RunConfig
from workers.device import choose_device, compute_dtype


def test_auto_is_half_precision_on_a_gpu_only() -> None:
    auto = FsdpConfig()
    assert compute_dtype(auto, torch.device("cuda")) == torch.bfloat16
    assert compute_dtype(auto, torch.device("cpu")) == torch.float32
    assert compute_dtype(FsdpConfig(param_dtype="float32"), torch.device("cuda")) == torch.float32


def test_a_cpu_can_be_asked_for_anywhere() -> None:
    config = RunConfig.model_validate({"resources": {"device": "cpu"}})
    assert choose_device(config, local_rank=3) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_where_there_is_none_is_one_line() -> None:
    with pytest.raises(UserError, match=r"resources\.device is cuda"):
        choose_device(RunConfig.model_validate({"resources": {"device": "cuda"}}), local_rank=0)
