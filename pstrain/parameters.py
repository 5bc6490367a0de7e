"""The variables of a model on their parameter servers.

Tables are placed shard by shard (`table`).  Everything small is packed: all
blocks that a ps holds of one kind and dtype are one flat buffer, so that a worker
reads them in one message.  The flat buffers are the truth during training; the
model's own Keras variables stay on the coordinator as mirrors, pulled when
someone looks and pushed when someone has changed them.

A ps that dies takes its buffers along; they come back from a checkpoint.
"""

import concurrent.futures
import dataclasses

import numpy as np
import tensorflow as tf

from pstrain import compat, plan
from pstrain.table import table_of


def ps_device(index):
    """Device of a parameter server, for `tf.device`."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block of a variable inside a flat buffer.

    Attributes:
        variable: the `keras.Variable` whose rows these are.
        block: `plan.Block`.
        offset: int, first element in the buffer.
        shape: list of int, the shape of the block.
    """

    variable: object
    block: plan.Block
    offset: int
    shape: list

    @property
    def size(self):
        """Number of elements."""
        return int(np.prod(self.shape))


class Flat:
    """Blocks of several variables, end to end in one `tf.Variable` on one ps.

    Attributes:
        ps: int.
        device: str.
        dtype: `tf.DType`.
        pieces: list of `Piece`.
        buffer: `tf.Variable` of rank 1 on the ps.
        slots: list of `tf.Variable` of the same shape, one for each slot of the
            optimizer; empty for variables that are not trained.
    """

    def __init__(self, ps, blocks, slots):
        """Allocates the buffer and its slots from the mirrors' values.

        Args:
            ps: int.
            blocks: list of `(variable, block)`.
            slots: dict from `id(variable)` to its list of slot variables.
        """
        self.ps = ps
        self.device = ps_device(ps)
        self.dtype = tf.as_dtype(compat.backend_value(blocks[0][0]).dtype)
        self.pieces = []
        offset = 0
        for variable, block in blocks:
            shape = list(variable.shape)
            if shape:
                shape[0] = block.end - block.begin
            self.pieces.append(Piece(variable, block, offset, shape))
            offset += self.pieces[-1].size
        self.size = offset
        self.buffer = self._allocate([p.variable for p in self.pieces])
        per_piece = [slots.get(id(p.variable), []) for p in self.pieces]
        self.slots = [self._allocate(kind) for kind in zip(*per_piece, strict=True)]

    def _allocate(self, mirrors):
        value = self._join(mirrors)
        with tf.device(self.device):
            return tf.Variable(value, trainable=False, name=f"flat_{self.ps}")

    def _join(self, mirrors):
        """The values of `mirrors`, one for each piece, as one vector."""
        parts = [
            rows_of(compat.backend_value(mirror), piece.block, piece.shape)
            for mirror, piece in zip(mirrors, self.pieces, strict=True)
        ]
        return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

    def read(self):
        """The buffer as a tensor; one message to the device that asks."""
        with tf.device(self.device):
            return self.buffer.read_value()

    def split(self, values):
        """Cuts a vector like the buffer into the blocks, in order of `pieces`."""
        parts = tf.split(values, [piece.size for piece in self.pieces])
        return [
            tf.reshape(part, piece.shape)
            for part, piece in zip(parts, self.pieces, strict=True)
        ]

    def join(self, by_variable):
        """Concatenates blocks of whole tensors, `id(variable)` -> tensor."""
        return tf.concat(
            [
                tf.reshape(rows_of(by_variable[id(p.variable)], p.block, p.shape), [-1])
                for p in self.pieces
            ],
            0,
        )


def rows_of(value, block, shape):
    """The rows of `block` of a whole tensor; all of it for a scalar."""
    if not shape or int(value.shape[0]) == block.end - block.begin:
        return tf.convert_to_tensor(value)
    return value[block.begin : block.end]


class Parameters:
    """All variables of a model that live on parameter servers.

    Attributes:
        tables: list of `keras.Variable` that hold a placed `Table`.
        dense: list of `Flat`: trained, read in every step.
        state: list of `Flat`: assigned by the forward pass.
        frozen: list of `Flat`: never changed.
        slots: dict from `id(variable)` to its list of slot variables.
        sharding: the `plan.Plan`.
    """

    def __init__(self, survey, sharding, paths, slots, treatment):
        """Allocates everything on the ps, all tables at the same time.

        Args:
            survey: `survey.Survey`.
            sharding: `plan.Plan` for the paths in `paths`.
            paths: dict from `id(variable)` to its path in the plan.
            slots: dict from `id(variable)` to its list of slot variables.
            treatment: callable from variable to a hashable; trained variables
                share a buffer only if the optimizer treats them alike.
        """
        self.tables = survey.tables
        self.slots = slots
        self.sharding = sharding
        self._paths = paths
        self._place_tables()
        self.dense = self._flats(survey.dense, slots, treatment)
        self.state = self._flats(survey.state, {}, lambda variable: None)
        self.frozen = self._flats(survey.frozen, {}, lambda variable: None)

    def _place_tables(self):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            jobs = []
            for variable in self.tables:
                blocks = [
                    (ps_device(b.ps), b.begin, b.end)
                    for b in self.sharding.blocks(self._paths[id(variable)])
                ]
                for owner in [variable, *self.slots.get(id(variable), [])]:
                    jobs.append(pool.submit(table_of(owner).place, blocks))
            for job in jobs:
                job.result()

    def _flats(self, variables, slots, treatment):
        groups = {}
        for variable in variables:
            for block in self.sharding.blocks(self._paths[id(variable)]):
                dtype = compat.backend_value(variable).dtype
                key = (block.ps, dtype, treatment(variable))
                groups.setdefault(key, []).append((variable, block))
        return [Flat(key[0], blocks, slots) for key, blocks in groups.items()]

    def pull(self):
        """Copies the flat buffers into the mirrors on the coordinator."""
        for flat in [*self.dense, *self.state]:
            for piece, part in zip(flat.pieces, flat.split(flat.read()), strict=True):
                _write_mirror(piece, part)

    def pull_slots(self):
        """Copies the optimizer's flat slots into its own variables."""
        for flat in self.dense:
            for number, slot in enumerate(flat.slots):
                parts = flat.split(slot.read_value())
                for piece, part in zip(flat.pieces, parts, strict=True):
                    mirror = self.slots[id(piece.variable)][number]
                    _write_mirror(dataclasses.replace(piece, variable=mirror), part)

    def push(self):
        """Copies the mirrors into the flat buffers."""
        for flat in [*self.dense, *self.state, *self.frozen]:
            values = {
                id(p.variable): compat.backend_value(p.variable) for p in flat.pieces
            }
            flat.buffer.assign(flat.join(values))


def assemble(flats, parts):
    """Whole tensors from blocks that may lie on several ps.

    Args:
        flats: list of `Flat`.
        parts: list of lists of tensors, as `Flat.split` gives for each.

    Returns:
        List of `(variable, tensor)`.
    """
    found = {}
    for flat, tensors in zip(flats, parts, strict=True):
        for piece, tensor in zip(flat.pieces, tensors, strict=True):
            blocks = found.setdefault(id(piece.variable), (piece.variable, []))[1]
            blocks.append((piece.block.begin, tensor))
    result = []
    for variable, blocks in found.values():
        blocks.sort(key=lambda item: item[0])
        tensors = [tensor for _, tensor in blocks]
        result.append((variable, tf.concat(tensors, 0) if blocks[1:] else tensors[0]))
    return result


def _write_mirror(piece, part):
    mirror = compat.backend_value(piece.variable)
    if part.shape == mirror.shape:
        mirror.assign(part)
    else:
        mirror[piece.block.begin : piece.block.end].assign(part)
