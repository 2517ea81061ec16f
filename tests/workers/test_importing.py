from __future__ import annotations

import gc

import pytest

from workers.importing import without_collection


def test_nothing_is_collected_inside_and_what_is_there_at_the_end_never_is() -> None:
    with without_collection():
        assert not gc.isenabled()
        made = [object()]
    assert gc.isenabled() and not any(found is made for found in gc.get_objects())


def test_a_failed_import_and_a_process_that_does_not_collect_are_left_as_they_were() -> None:
    with pytest.raises(ImportError), without_collection():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
