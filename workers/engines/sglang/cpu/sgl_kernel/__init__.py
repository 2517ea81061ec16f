"""Names that SGLang imports on a CPU from its kernel package, which has no CPU build in the package index.

Dense models in `attention_backend="torch_native"` never call them; a call is an error. Engine processes on a CPU
find this folder on their path when no other `sgl_kernel` is installed.
"""

from __future__ import annotations

from typing import NoReturn


def _missing(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("this is a stand-in for sgl_kernel without kernels")


assign_draft_cache_locs_contiguous_cpu = _missing
assign_extend_cache_locs_cpu = _missing
assign_req_to_token_pool_cpu = _missing
build_tree_kernel_efficient_cpu = _missing
copy_all_layer_kv_cache_cpu = _missing
fill_accept_out_cache_loc_cpu = _missing
fill_bonus_tokens_cpu = _missing
verify_tree_greedy_cpu = _missing
