"""Rank actors that watch or break something, for tests; imported by the worker processes."""

from __future__ import annotations

import os
import signal
from typing import Any

from workers.data_plane import DataPlane
from workers.envelope import Envelope
from workers.rank_actor import RankActor, RankSpec
from workers.rank_context import RankContext


class PaddingForbidden(RankActor):
    """Every common way to pad raises on this rank, in every stage."""

    def build(self, spec: RankSpec, plane: DataPlane) -> RankContext:
        import numpy as np
        import torch
        from transformers import PreTrainedTokenizerBase

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("something was padded")

        torch.nn.functional.pad = refuse
        torch.nn.utils.rnn.pad_sequence = refuse
        torch.nn.utils.rnn.pad_packed_sequence = refuse
        torch.nested.to_padded_tensor = refuse
        np.pad = refuse
        PreTrainedTokenizerBase.pad = refuse
        return super().build(spec, plane)


class LostInShutdown(RankActor):
    """The first rank is killed when it is asked to end."""

    def shutdown(self) -> Envelope:
        assert self._spec is not None
        if self._spec.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        answer: Envelope = super().shutdown()
        return answer
