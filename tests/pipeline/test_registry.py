"""Names and import paths of a user's functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cursor import num_batches
from pipeline.registry import Registry, import_object

Function = Callable[[], int]


@pytest.fixture
def registry() -> Registry[Function]:
    registry: Registry[Function] = Registry("loss")
    registry.register("one")(lambda: 1)
    registry.register("two")(lambda: 2)
    return registry


def test_a_name_finds_its_entry(registry: Registry[Function]) -> None:
    assert registry.get("two")() == 2
    assert registry.names() == ("one", "two")


def test_an_unknown_name_lists_the_known_ones(registry: Registry[Function]) -> None:
    with pytest.raises(ValueError, match="unknown loss 'three'; known: one, two") as caught:
        registry.get("three")
    assert "\n" not in str(caught.value)


def test_a_taken_name_is_refused_and_registering_again_is_not(registry: Registry[Function]) -> None:
    with pytest.raises(ValueError, match="'one' is registered already"):
        registry.register("one")(lambda: 3)
    registry.register("one")(registry.get("one"))


def test_a_name_with_a_colon_is_refused(registry: Registry[Function]) -> None:
    with pytest.raises(ValueError, match="no colon"):
        registry.register("a:b")


def test_a_module_path_is_imported(registry: Registry[Function]) -> None:
    found: object = registry.get("pipeline.cursor:num_batches")
    assert found is num_batches


def test_a_file_is_executed_once(registry: Registry[Function], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    log = tmp_path / "log"
    file.write_text(f"open({str(log)!r}, 'a').write('x')\ndef f(): return 7\ndef g(): return 8\n")
    assert registry.get(f"{file}:f")() == 7
    assert registry.get(f"{file}:g")() == 8
    assert log.read_text() == "x"
    with pytest.raises(ValueError, match="has no 'h'; valid: f, g"):
        registry.get(f"{file}:h")


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"NAME = {folder!r}\n")
    assert [import_object(f"{tmp_path / folder / 'same.py'}:NAME") for folder in "ab"] == ["a", "b"]


def test_a_file_that_fails_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("raise RuntimeError('mine')\n")
    with pytest.raises(RuntimeError, match="mine"):
        import_object(f"{file}:f")
    file.write_text("f = 5  # mended, of another size\n")
    assert import_object(f"{file}:f") == 5


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.x:f", "no module 'no_such_package'"),
        ("pipeline.no_such:f", "no module 'pipeline.no_such'"),
        ("pipeline.cursor:no_such", "has no 'no_such'"),
        ("missing.py:f", "no file .*missing.py"),
        (":f", "package.module:name"),
        ("pipeline.cursor:", "package.module:name"),
    ],
)
def test_a_wrong_path_says_which_part_is_wrong(registry: Registry[Function], path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.get(path)


def test_an_import_that_fails_inside_the_users_module_keeps_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        import_object("needs_more:f")
