from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from workers.engines.base import GenerateRequest
from workers.engines.batches import plan_batches

REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=20)


@given(shape=REQUESTS, new=st.integers(1, 30), budget=st.integers(1, 600))
def test_every_sample_is_in_one_batch_and_batches_keep_the_budget(
    shape: list[tuple[int, int]], new: int, budget: int
) -> None:
    requests = [
        GenerateRequest(request_id=i, prompt_tokens=[1] * length, seeds=tuple(range(samples)))
        for i, (length, samples) in enumerate(shape)
    ]
    batches = plan_batches(requests, max_new_tokens=new, max_batch_tokens=budget)
    samples = Counter((p.request, s) for batch in batches for p in batch for s in range(p.first, p.last))
    assert samples == Counter((i, s) for i, (_, count) in enumerate(shape) for s in range(count))
    for batch in batches:
        rows = sum(part.num_rows for part in batch)
        longest = max(shape[part.request][0] for part in batch)
        assert rows == 1 or rows * (longest + new) <= budget
        assert len({part.request for part in batch}) == len(batch)


def test_a_group_that_fits_a_batch_is_not_cut() -> None:
    requests = [GenerateRequest(request_id=i, prompt_tokens=[1] * 10, seeds=(0,) * 4) for i in range(5)]
    batches = plan_batches(requests, max_new_tokens=10, max_batch_tokens=20 * 6)
    assert [[part.num_rows for part in batch] for batch in batches] == [[4]] * 5
