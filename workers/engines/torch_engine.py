"""The embedded engine: batched sampling with a KV cache on a Hugging Face causal LM, nothing else needed.

A prompt is computed once for all its samples; batches are filled with prompts of similar length up to
`max_batch_tokens`; finished samples leave their batch; logits exist for the last token only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.rollouts import Array
from workers.engines import attention
from workers.engines.base import (
    EngineError,
    EngineMetadata,
    GenerateRequest,
    GenerateResult,
    Sample,
    SamplingParams,
)
from workers.engines.batches import PromptSlice, plan_batches
from workers.engines.decoding import Batch, CacheShape, DecodedBatch, Decoder
from workers.engines.packed_linear import packed_linears
from workers.engines.request_limits import RequestLimits
from workers.progress import STAGE

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Expected |engine - trainer| of one log-probability."""


class TorchEngine:
    """Generates with `model`, which it takes over: moved to `device` and `dtype`, without gradients.

    reproducible: the same seeds and weights give the same samples. Bitwise for the same call; in another
    batch up to the rounding of matrix products, which can decide only between candidates that tie.
    Raises ValueError for a model whose layers are neither full nor sliding attention.
    """

    reproducible = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        max_batch_tokens: int = 65536,
        version: int = 0,
    ) -> None:
        self._device = torch.device(device)
        self._shape = cache_shape(model.config)
        self._model = model.to(device=self._device, dtype=dtype or model.dtype).eval().requires_grad_(False)
        self._model.set_attn_implementation(attention.NAME)
        if self._model.dtype != torch.float32:
            _give_float32_logits(self._model)
        self._max_batch_tokens = max_batch_tokens
        self._limits = RequestLimits(
            vocabulary=self._model.get_input_embeddings().num_embeddings,
            positions=self._model.config.get_text_config().max_position_embeddings,
        )
        self._awake = True
        self.version = version

    @property
    def metadata(self) -> EngineMetadata:
        dtype = self._model.dtype
        return EngineMetadata(
            engine="torch",
            dtype=str(dtype).removeprefix("torch."),
            reproducible=self.reproducible,
            log_prob_tolerance=TOLERANCES[dtype],
        )

    def weights(self) -> dict[str, Tensor]:
        """Parameters by Hugging Face name, tied ones once; write into them in place, then `set_version`."""
        return dict(self._model.named_parameters())

    def set_version(self, version: int) -> None:
        """Nothing is kept between calls of `generate`, so there is nothing to flush."""
        self.version = version

    def sleep(self) -> None:
        """Move the weights to the host; earlier results of `weights` are no longer the model's."""
        self._awake = False
        if self._device.type == "cuda":
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self._model.to(self._device)
        self._awake = True

    def shutdown(self) -> None:
        """Give the memory back; the engine cannot be used again."""
        self.sleep()
        self._model.to("meta")

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[GenerateResult]:
        """See `RolloutEngine.generate`. Raises ValueError for ids or lengths that the model cannot take,
        EngineError when asleep or when the weights give log-probabilities that are not finite."""
        if not self._awake:
            raise EngineError("torch engine: asleep, call wake() first")
        self._limits.check(requests, sampling)
        batches = plan_batches(
            requests, max_new_tokens=sampling.max_new_tokens, max_batch_tokens=self._max_batch_tokens
        )
        num_rows = max((sum(part.num_rows for part in slices) for slices in batches), default=0)
        samples: list[list[Sample]] = [[] for _ in requests]
        STAGE.begin(len(batches) * sampling.max_new_tokens)
        with packed_linears(self._model, num_rows=num_rows, num_steps=sampling.max_new_tokens * len(batches)):
            for number, slices in enumerate(batches):
                STAGE.at(number * sampling.max_new_tokens)
                decoded = Decoder(self._model, self._shape, _batch(requests, slices), sampling).run()
                made = iter(self._samples(decoded))
                for part in slices:
                    samples[part.request] += [next(made) for _ in range(part.num_rows)]
        return [
            GenerateResult(request_id=request.request_id, samples=tuple(own))
            for request, own in zip(requests, samples, strict=True)
        ]

    def _samples(self, decoded: DecodedBatch) -> list[Sample]:
        return [
            _sample(decoded, row, np.full(int(length), self.version, dtype=np.int32))
            for row, length in enumerate(decoded.lengths)
        ]


def cache_shape(config: Any) -> CacheShape:
    """Of a model with this configuration; raises ValueError where the engine has no attention for a layer."""
    text = config.get_text_config()
    kinds = set(text.to_dict().get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    shared = bool(getattr(text, "num_kv_shared_layers", 0))
    if kinds or shared or not hasattr(text, "num_attention_heads"):
        raise ValueError(
            f"torch engine: model_type {text.model_type!r} has layers other than full or sliding attention "
            f"({', '.join(sorted(kinds)) or ('shared keys and values' if shared else 'no attention')})"
        )
    heads = text.num_attention_heads
    return CacheShape(
        num_layers=text.num_hidden_layers,
        num_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
    )


def _batch(requests: Sequence[GenerateRequest], slices: Sequence[PromptSlice]) -> Batch:
    return Batch(
        prompts=[requests[part.request].prompt_tokens for part in slices],
        rows=[number for number, part in enumerate(slices) for _ in range(part.num_rows)],
        seeds=[seed for part in slices for seed in requests[part.request].seeds[part.first : part.last]],
    )


def _sample(decoded: DecodedBatch, row: int, versions: Array) -> Sample:
    log_probs = decoded.log_probs[row, : len(versions)].copy()
    if not np.isfinite(log_probs).all():
        raise EngineError("torch engine: log-probabilities are not finite; the weights hold NaN or infinity")
    return Sample(
        token_ids=decoded.token_ids[row, : len(versions)].copy(),
        log_probs=log_probs,
        policy_version=versions,
        finish_reason="stop" if decoded.stopped[row] else "length",
    )


class _Float32Logits(nn.Module):
    """The head of a 16-bit model with logits accumulated and kept in float32, as trainers compute them."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.is_cuda:
            rows = torch.mm(hidden.flatten(0, -2), self.weight.t(), out_dtype=torch.float32)
            logits = rows.view(*hidden.shape[:-1], -1)
        else:
            logits = nn.functional.linear(hidden.float(), self.weight.float())
        return logits if self.bias is None else logits + self.bias


def _give_float32_logits(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        model.set_output_embeddings(_Float32Logits(head))
