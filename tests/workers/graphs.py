"""What torch.compile made of a model's layers."""

from __future__ import annotations

from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from workers.packed_model import decoder_layers


def num_graphs(hf: PreTrainedModel) -> int:
    """Compiled variants of the layers' forward method, which all models of the architecture share.

    Call it before FSDP gives the layers' class another name, or give it a model that is not sharded.
    """
    return len(_debug_get_cache_entry_list(type(decoder_layers(hf)[0]).forward))


def num_breaks() -> int:
    """Places where a graph ended early, since the compiler was reset; anywhere in the process."""
    return sum(counters["graph_break"].values())
