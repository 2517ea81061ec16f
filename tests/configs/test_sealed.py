"""A sealed document is read as it was written, or refused."""

from __future__ import annotations

import json

import pytest

from configs.sealed import KEY, seal, unseal

DOCUMENT = {"iteration": 3, "reward_mean": 0.1, "kl": {"a": [1, 2.5e-9, None]}, "text": 'é " \n'}


@pytest.mark.parametrize("indent", [None, 2])
def test_no_flipped_bit_and_no_cut_gives_another_document(indent: int | None) -> None:
    data = seal(DOCUMENT, indent=indent).encode()
    assert unseal(data) == DOCUMENT
    changed = [data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
               for place in range(len(data)) for bit in range(8)]  # fmt: skip
    changed += [data[:end] for end in range(len(data))]
    refused = 0
    for other in changed:
        try:
            assert unseal(other) == DOCUMENT, other
        except ValueError:
            refused += 1
    assert refused > len(changed) * 0.9


def test_the_layout_does_not_count_and_the_contents_do() -> None:
    document = json.loads(seal(DOCUMENT))
    assert unseal(json.dumps(document, indent=4, ensure_ascii=False)) == DOCUMENT
    with pytest.raises(ValueError, match="does not fit its checksum"):
        unseal(json.dumps({**document, "reward_mean": 0.2}))


def test_a_document_without_a_checksum_is_taken_as_it_is() -> None:
    assert unseal("{}") == {} and unseal('{"a": "1b2c3d4e"}') == {"a": "1b2c3d4e"}
    assert list(json.loads(seal({"a": 1}))) == ["a", KEY]


@pytest.mark.parametrize("text", ["", "[1]", "[" * 5000, '{"a": NaN}', '{"a": -Infinity}', '{"a": 1%s}' % ("0" * 400)])
def test_what_no_document_of_ours_is_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"^is "):
        unseal(text)
