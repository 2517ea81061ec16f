"""Run as a program, since SGLang ends its process on a failure: greedy ids of a Hugging Face folder, as JSON."""

from __future__ import annotations

import json
import sys

from workers.engines.sglang.versions import CPU_ARGUMENTS, forking, skip_other_models


def main() -> None:
    skip_other_models("LlamaForCausalLM")
    from sglang.srt.entrypoints.engine import Engine

    engine = forking(Engine)(
        model_path=sys.argv[1],
        device="cpu",
        dtype="float32",
        sampling_backend="pytorch",
        grammar_backend="none",
        log_level="error",
        **CPU_ARGUMENTS,
    )
    sampling = {"temperature": 0, "max_new_tokens": int(sys.argv[3])}
    outputs = engine.generate(input_ids=json.loads(sys.argv[2]), sampling_params=sampling)
    print(json.dumps([list(output["output_ids"]) for output in outputs]))
    engine.shutdown()


if __name__ == "__main__":
    main()
