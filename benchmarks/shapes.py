"""Sizes of the models that the benchmarks make: those of Qwen2, whole or cut to a number of layers."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from benchmarks.command_line import positive
from configs.errors import UserError
from pipeline.reshard.geometry import ModelGeometry
from pipeline.reshard.shapes import SHAPES

SHAPE_NAMES = {"7b": "qwen2-7b", "1.5b": "qwen2-1.5b", "tiny": "qwen2-tiny"}


def add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        choices=SHAPE_NAMES,
        default="tiny",
        help="sizes of the Qwen2 model, with random weights: 7.6 B or 1.5 B parameters, or tiny for a try-out "
        "(default: %(default)s)",
    )


def add_layers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layers",
        type=positive,
        default=None,
        help="how many of the shape's layers: 14 of the 28 of 7b load a GPU about as all load two (default: all)",
    )


def geometry_of(options: argparse.Namespace) -> ModelGeometry:
    """Of `--shape`, cut to `--layers`. Raises UserError where it has fewer."""
    whole = SHAPES[SHAPE_NAMES[options.shape]]
    if (options.layers or 0) > whole.num_layers:
        raise UserError(f"--layers {options.layers}: --shape {options.shape} has {whole.num_layers}; lower it")
    return dataclasses.replace(whole, num_layers=options.layers or whole.num_layers)


def title_of(options: argparse.Namespace) -> str:
    """What a table says of the model."""
    name, layers = SHAPE_NAMES[options.shape], geometry_of(options).num_layers
    cut = layers < SHAPES[name].num_layers
    return f"{name} with {layers} layer{'s' if layers > 1 else ''}" if cut else name


def model_arguments(geometry: ModelGeometry) -> dict[str, Any]:
    """Of `AutoConfig.for_model`, and of `actor.init`; without the number of positions."""
    return {
        "model_type": geometry.family,
        "vocab_size": geometry.vocab_size,
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "num_hidden_layers": geometry.num_layers,
        "num_attention_heads": geometry.num_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "tie_word_embeddings": geometry.tied,
    }
