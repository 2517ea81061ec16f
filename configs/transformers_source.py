"""What the installed transformers knows, read from its source: importing it takes seconds, as it imports torch.

Everything here answers "nothing known" when the source looks otherwise than expected.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from configs.python_source import parsed

AUTO = "models/auto"
BASES = (("configuration_utils.py", "PreTrainedConfig"), ("modeling_rope_utils.py", "RotaryEmbeddingConfigMixin"))
"""Files and classes of what every configuration has."""
KWARGS = "kwargs"
MAKERS = ("__init__", "__post_init__", "convert_rope_params_to_dict")
"""Methods that take settings."""
READ = re.compile(r"""\bconfig\.(\w+)|\bgetattr\(\s*(?:self\.)?config,\s*["'](\w+)["']""")
"""A setting that a model reads."""
GENERAL = frozenset({"hidden_size", "num_attention_heads", "num_hidden_layers", "head_dim", "max_position_embeddings"})
"""What transformers itself asks any configuration for."""


@cache
def model_types() -> frozenset[str]:
    """Names of `model_type`; empty: unknown."""
    return frozenset(_mapping("auto_mappings.py", "CONFIG_MAPPING_NAMES")) | frozenset(
        _mapping("configuration_auto.py", "CONFIG_MAPPING_NAMES")
    )


@cache
def causal_model_types() -> frozenset[str]:
    """Types that have a causal language model; empty: unknown."""
    return frozenset(_mapping("modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"))


@cache
def settings_of(model_type: str) -> frozenset[str]:
    """Names of the settings of this type's configuration; empty: unknown.

    They are the fields of its classes and of the base class, their other names (`attribute_map`), what their methods
    set or take out of `**kwargs`, and what the type's models read from it: rather one too many than one too few.
    """
    # a type's part for text is described beside the whole: gemma3_text in gemma3
    root, folder = _root(), model_type.replace("-", "_").removesuffix("_text")
    if root is None:
        return frozenset()
    models = root / "models" / folder
    bodies = _classes(models / f"configuration_{folder}.py").values()
    if not any(True for body in bodies for _ in _fields(body)):
        return frozenset()
    bases = (_classes(root / file).get(name) for file, name in BASES)
    names = (_settings(body) for body in (*bodies, *bases) if body is not None)
    return frozenset(name for found in names for name in found) | _read_by_models(models) | GENERAL


def _settings(body: ast.ClassDef) -> Iterator[str]:
    """What a class of configurations calls its settings."""
    yield from _fields(body)
    for target, value in _assigned(body):
        yield target
        if target == "attribute_map":
            yield from _strings(ast.walk(value))
    for function in body.body:
        if isinstance(function, ast.FunctionDef):
            yield from (function.name for decorator in function.decorator_list if _is_named(decorator, "property"))
            if function.name in MAKERS:
                yield from (argument.arg for argument in (*function.args.args, *function.args.kwonlyargs))
                yield from _set_or_taken(function)


def _set_or_taken(function: ast.FunctionDef) -> Iterator[str]:
    """`name` of `self.name = ...` and of `kwargs.pop("name")`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_named(node.value, "self"):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_named(node.func.value, KWARGS):
            yield from _strings(node.args[:1])


def _read_by_models(models: Path) -> frozenset[str]:
    texts = (_text(file) for file in models.glob("modeling_*.py"))
    return frozenset(name for text in texts for pair in READ.findall(text) for name in pair if name)


def _is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _strings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    return (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


@cache
def default_positions(model_type: str) -> int | None:
    """`max_position_embeddings` of this type where a configuration does not say; None: unknown."""
    root, folder = _root(), model_type.replace("-", "_").removesuffix("_text")
    file = root / "models" / folder / f"configuration_{folder}.py" if root is not None else None
    for body in _classes(file).values() if file is not None else ():
        values = {target: value for target, value in _assigned(body) if isinstance(value, ast.Constant)}
        positions = values.get("max_position_embeddings")
        if "model_type" in values and values["model_type"].value == model_type and positions is not None:
            return positions.value if isinstance(positions.value, int) else None
    return None


def _assigned(body: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Names and values in a class, with and without an annotation."""
    for node in body.body:
        if not isinstance(node, ast.AnnAssign | ast.Assign) or node.value is None:
            continue
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
        yield from ((target.id, node.value) for target in targets if isinstance(target, ast.Name))


def _root() -> Path | None:
    spec = importlib.util.find_spec("transformers")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _mapping(file: str, name: str) -> list[str]:
    """Keys of `name = OrderedDict([("key", ...), ...])`."""
    root = _root()
    tree = _parsed(root / AUTO / file) if root is not None else None
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            pairs = [item for item in ast.walk(node.value) if isinstance(item, ast.Tuple) and item.elts]
            keys = [pair.elts[0] for pair in pairs]
            return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return []


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    tree = _parsed(file)
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)} if tree is not None else {}


def _fields(body: ast.ClassDef | None) -> list[str]:
    nodes = body.body if body is not None else []
    return [node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]


def _parsed(file: Path) -> ast.Module | None:
    try:
        return parsed(_text(file))
    except (SyntaxError, ValueError):
        return None


def _text(file: Path) -> str:
    """Empty for a file that cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
