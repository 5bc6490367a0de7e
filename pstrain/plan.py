"""The sharding plan: which rows of which variable live on which ps.

A plan is made before anything is allocated and needs no cluster, so it can be
printed, tested and argued about.  Variables are cut along their first axis, as
TensorFlow's partitioners do, and the blocks go to the ps that holds the fewest
bytes so far, the largest blocks first.
"""

import dataclasses

import numpy as np
import tensorflow as tf

# What happens with a variable, and where its truth is during training.
KINDS = {
    "table": "looked up by rows",
    "dense": "read whole each step, packed",
    "state": "read and summed once a dispatch, packed",
    "frozen": "read once a dispatch, packed",
}


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows `[begin, end)` of a variable on ps number `ps`."""

    ps: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Request:
    """A variable that wants a place.

    Attributes:
        path: str, the Keras path, unique in the model.
        kind: str, one of `KINDS`.
        shape: tuple of int.
        dtype: str.
        num_slots: int, optimizer variables of the same shape beside it.
        whole: bool, must not be cut (a constraint or optimizer needs all of it).
    """

    path: str
    kind: str
    shape: tuple
    dtype: str
    num_slots: int = 0
    whole: bool = False

    @property
    def num_rows(self):
        """Size of the axis along which the variable is cut."""
        return self.shape[0] if self.shape else 1

    @property
    def num_bytes(self):
        """Size of the variable and its slots in bytes."""
        size = int(np.prod(self.shape)) * tf.as_dtype(self.dtype).size
        return size * (1 + self.num_slots)


@dataclasses.dataclass(frozen=True)
class Placement:
    """A variable with its place: consecutive blocks that cover all rows."""

    request: Request
    blocks: tuple

    def block_bytes(self, block):
        """Size of one block with its slots, in bytes."""
        rows = max(1, self.request.num_rows)
        return self.request.num_bytes * (block.end - block.begin) // rows


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where everything lives.

    Attributes:
        num_ps: int.
        placements: dict from variable path to `Placement`, in model order.
    """

    num_ps: int
    placements: dict

    def blocks(self, path):
        """The blocks of one variable."""
        return self.placements[path].blocks

    def bytes_per_ps(self):
        """List of bytes that each ps holds, slots included."""
        load = [0] * self.num_ps
        for placement in self.placements.values():
            for block in placement.blocks:
                load[block.ps] += placement.block_bytes(block)
        return load

    def imbalance(self):
        """Bytes of the fullest ps over the mean; 1.0 is perfect."""
        load = self.bytes_per_ps()
        return max(load) / (sum(load) / len(load)) if sum(load) else 1.0

    def rows(self):
        """The placement table as lists of str, a header first."""
        table = [["variable", "shape", "kind", "shards on ps", "bytes with slots"]]
        for placement in self.placements.values():
            request = placement.request
            places = [f"{b.ps}[{b.begin}:{b.end}]" for b in placement.blocks]
            if len(places) == 1:
                places = [str(placement.blocks[0].ps)]
            shape = "x".join(map(str, request.shape)) or "scalar"
            table.append(
                [
                    request.path,
                    shape,
                    request.kind,
                    " ".join(places),
                    f"{request.num_bytes:,}",
                ]
            )
        return table

    def summary(self):
        """One line: bytes on each ps and how even that is."""
        load = self.bytes_per_ps()
        shares = ", ".join(f"ps {i} {n:,}" for i, n in enumerate(load))
        return f"bytes: {shares}; max over mean {self.imbalance():.2f}"

    def text(self):
        """The placement table and the summary, aligned for a terminal."""
        table = self.rows()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
            for row in table
        ]
        return "\n".join([*(line.rstrip() for line in lines), self.summary()])


def make(requests, num_ps, partitioner):
    """Decides a place for every requested variable.

    Args:
        requests: list of `Request` with distinct paths.
        num_ps: int, number of parameter servers, at least 1.
        partitioner: callable of `(shape, dtype)` that returns the number of
            pieces along each axis, for example
            `tf.distribute.experimental.partitioners.MinSizePartitioner`.

    Returns:
        A `Plan`.
    """
    blocks = {}
    load = [0] * num_ps
    for request in sorted(requests, key=lambda r: -r.num_bytes):
        bounds = _cut(request, partitioner)
        row_bytes = request.num_bytes / max(1, request.num_rows)
        used = [0] * num_ps
        chosen = []
        for begin, end in bounds:
            # Spread one variable first, balance bytes second.
            ps = min(range(num_ps), key=lambda i: (used[i], load[i]))
            used[ps] += 1
            load[ps] += row_bytes * (end - begin)
            chosen.append(Block(ps, begin, end))
        blocks[request.path] = tuple(chosen)
    placements = {r.path: Placement(r, blocks[r.path]) for r in requests}
    return Plan(num_ps, placements)


def _cut(request, partitioner):
    """Bounds of equal blocks of rows; the first ones take the remainder."""
    rows = request.num_rows
    count = 1
    if request.shape and not request.whole:
        shape = tf.TensorShape(request.shape)
        pieces = partitioner(shape=shape, dtype=tf.as_dtype(request.dtype))
        count = max(1, min(pieces[0], rows))
    size, extra = divmod(rows, count)
    ends = [size * (i + 1) + min(i + 1, extra) for i in range(count)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
