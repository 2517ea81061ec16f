"""What the installed transformers knows, read from its source: importing it takes seconds, as it imports torch.

Everything here answers "nothing known" when the source looks otherwise than expected.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from configs.python_source import parsed

AUTO = "models/auto"
BASE = "PreTrainedConfig"


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
    """Names of the settings of this type's configuration; empty: unknown."""
    # a type's part for text is described beside the whole: gemma3_text in gemma3
    root, folder = _root(), model_type.replace("-", "_").removesuffix("_text")
    if root is None:
        return frozenset()
    file = root / "models" / folder / f"configuration_{folder}.py"
    names = {name for body in _classes(file).values() for name in _fields(body)}
    return (
        frozenset(names | set(_fields(_classes(root / "configuration_utils.py").get(BASE)))) if names else frozenset()
    )


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
        return parsed(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
