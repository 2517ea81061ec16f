"""Where training keeps a parameter: FSDP2's Shard(0) or Shard(1) over the ranks of one group."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.reshard.boxes import Box, whole, with_dim


@dataclass(frozen=True, kw_only=True)
class Source:
    """A training parameter under its Hugging Face name.

    shape: of the whole parameter. shard_dim: the sharded dim; None: whole on every rank.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None = 0

    def box(self, rank: int, num_ranks: int) -> Box | None:
        """What `rank` holds, in coordinates of the whole parameter; None: nothing.

        Chunks are of ceil(size / num_ranks), as torch.chunk makes them: the last ones may be short or empty.
        """
        box = whole(self.shape)
        if self.shard_dim is None:
            return box
        start, stop = chunk(self.shape[self.shard_dim], rank, num_ranks)
        return with_dim(box, self.shard_dim, start, stop) if start < stop else None

    def divides(self, num_ranks: int) -> bool:
        """Whether all ranks hold equally much."""
        return self.shard_dim is not None and self.shape[self.shard_dim] % num_ranks == 0

    def holders(self, box: Box, num_ranks: int) -> range:
        """Ranks whose shards meet `box`."""
        if self.shard_dim is None:
            return range(num_ranks)
        size = -(-self.shape[self.shard_dim] // num_ranks)
        start, stop = box[self.shard_dim]
        return range(start // size, (stop - 1) // size + 1)


def chunk(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """FSDP2's share of `size` rows: (start, stop), empty for ranks beyond the last chunk."""
    length = -(-size // num_ranks)
    return min(rank * length, size), min((rank + 1) * length, size)
