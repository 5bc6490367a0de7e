"""Checkpoints that fit any number of parameter servers.

A checkpoint is an ordinary TensorFlow bundle (`tf.train.load_checkpoint` reads
it) with one logical tensor for each variable, under its Keras path, whatever its
shards or its place in a packed buffer.  Every ps writes the blocks that it holds
as slices of those tensors, and reads back the slices that it needs, so nothing
large passes through the coordinator and the next run may have other ps.

Files are complete before the name `ckpt-<step>` exists and before the file
`checkpoint` mentions it; whoever dies during a save leaves the one before.

The directory must be the same for the coordinator and every ps (one machine or a
shared file system).
"""

import concurrent.futures
import dataclasses
import json
import os
import re
import uuid
from collections.abc import Callable

import tensorflow as tf

from pstrain import compat
from pstrain.errors import JobError, UsageError
from pstrain.table import table_of

KEEP_CHECKPOINTS = 5
METADATA = "pstrain/metadata"
STEP = "pstrain/global_step"
LEARNING_RATE = "optimizer/learning_rate"
# TensorFlow 2.21 cannot read slices of these (BundleReader::GetSliceValue); the
# dtypes that they are saved in hold all of their values.
SAVED_IN = {
    tf.float16: tf.float32,
    tf.bool: tf.uint8,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A block of a saved tensor, where it is now.

    Attributes:
        key: str, name in the checkpoint.
        shape: tuple of int, shape of the whole tensor.
        begin: int, first row of the block.
        end: int, row after the last.
        dtype: `tf.DType`.
    """

    key: str
    shape: tuple
    begin: int
    end: int
    dtype: tf.DType

    @property
    def spec(self):
        """The block in TensorFlow's notation, "" for a whole tensor."""
        if not self.shape or self.end - self.begin == self.shape[0]:
            return ""
        rest = [f"0,{n}" for n in self.shape[1:]]
        sizes = " ".join(map(str, self.shape))
        return f"{sizes} {':'.join([f'{self.begin},{self.end - self.begin}', *rest])}"

    @property
    def saved_dtype(self):
        """The dtype in the checkpoint."""
        return SAVED_IN.get(self.dtype, self.dtype)


@dataclasses.dataclass(frozen=True)
class Part:
    """What one device writes and reads: some slices, and how to get at them.

    Attributes:
        device: str.
        slices: list of `Slice`.
        read: callable that returns their tensors, run on the device.
        write: callable that takes their tensors, run on the device.
    """

    device: str
    slices: list
    read: Callable
    write: Callable


def parts_of(parameters, paths):
    """The parts of all variables on parameter servers.

    Args:
        parameters: `parameters.Parameters`.
        paths: dict from `id(variable)` to its unique path.

    Returns:
        List of `Part`.
    """
    parts = []
    for variable in parameters.tables:
        path = paths[id(variable)]
        parts += _table_parts(path, table_of(variable))
        for slot in parameters.slots.get(id(variable), []):
            parts += _table_parts(_slot_key(variable, slot, path), table_of(slot))
    for flat in [*parameters.dense, *parameters.state, *parameters.frozen]:
        keys = [paths[id(piece.variable)] for piece in flat.pieces]
        parts.append(_flat_part(flat, flat.buffer, keys))
        for number, buffer in enumerate(flat.slots):
            slots = [parameters.slots[id(p.variable)][number] for p in flat.pieces]
            slot_keys = [
                _slot_key(piece.variable, slot, path)
                for piece, slot, path in zip(flat.pieces, slots, keys, strict=True)
            ]
            parts.append(_flat_part(flat, buffer, slot_keys))
    return parts


def _slot_key(variable, slot, path):
    name = slot.name.removeprefix(variable.path.replace("/", "_") + "_")
    return f"optimizer/{name}/{path}"


def _table_parts(key, whole):
    shape = tuple(whole.shape.as_list())
    return [
        Part(
            shard.device,
            [Slice(key, shape, begin, end, whole.dtype)],
            lambda shard=shard: [shard.read_value()],
            lambda tensors, shard=shard: shard.assign(tensors[0], read_value=False),
        )
        for shard, begin, end in zip(
            whole.shards, whole.offsets[:-1], whole.offsets[1:], strict=True
        )
    ]


def _flat_part(flat, buffer, keys):
    slices = [
        Slice(key, tuple(p.variable.shape), p.block.begin, p.block.end, flat.dtype)
        for key, p in zip(keys, flat.pieces, strict=True)
    ]

    def write(tensors):
        joined = tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)
        buffer.assign(joined, read_value=False)

    return Part(flat.device, slices, lambda: flat.split(buffer.read_value()), write)


def absolute(directory):
    """The absolute path of a directory for checkpoints, on any file system.

    Raises:
        UsageError: TensorFlow could write checkpoints there but not read them.
    """
    directory = os.fspath(directory)
    # TensorFlow 2.21 looks for the files of a checkpoint by pattern (RestoreV2).
    if re.search(r"[\[\\]", directory):
        raise UsageError(
            "TensorFlow takes [ and \\ in the path of a checkpoint for a pattern; "
            f"received: model directory {directory}; give one without them"
        )
    return directory if "://" in directory else os.path.abspath(directory)


def save(directory, step, parts, local, keep=KEEP_CHECKPOINTS):
    """Writes `<directory>/ckpt-<step>` and forgets the oldest ones.

    Args:
        directory: str, exists for the coordinator and every ps.
        step: int, the global step, becomes part of the name.
        parts: list of `Part`.
        local: dict from key to a numpy value that the coordinator adds.
        keep: int, checkpoints to keep.

    Returns:
        The path, without the file endings.

    Raises:
        JobError: a file could not be written.
    """
    prefix = os.path.join(directory, f"ckpt-{step}")
    temporary = f"{prefix}_temp_{uuid.uuid4().hex[:8]}"
    by_device = _by_device(parts)
    names = [f"{temporary}/part-{i}" for i in range(len(by_device) + 1)]
    metadata = {"format": 1, "keras_paths": True}
    local = {STEP: step, METADATA: json.dumps(metadata), **local}

    def write(name, device, group):
        with tf.device(device):
            slices = [s for part in group for s in part.slices]
            tensors = [t for part in group for t in part.read()]
            tf.raw_ops.SaveV2(
                prefix=name,
                tensor_names=[s.key for s in slices],
                shape_and_slices=[s.spec for s in slices],
                tensors=[
                    tf.cast(t, s.saved_dtype)
                    for t, s in zip(tensors, slices, strict=True)
                ],
            )

    try:
        _remove_unfinished(directory)
        tf.io.gfile.makedirs(temporary)
        _in_parallel(
            write,
            [(n, d, g) for n, (d, g) in zip(names[1:], by_device.items(), strict=True)],
        )
        tf.raw_ops.SaveV2(
            prefix=names[0],
            tensor_names=list(local),
            shape_and_slices=[""] * len(local),
            tensors=[tf.convert_to_tensor(value) for value in local.values()],
        )
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=names, destination_prefix=prefix, delete_old_dirs=True
        )
    except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError) as error:
        raise JobError(
            f"the checkpoint could not be written, since some ps do not see or may "
            f"not write the model directory; received: {directory}: "
            f"{_first_line(error)}; give a directory that all tasks share"
        ) from error
    _register(directory, prefix, keep)
    return prefix


def _remove_unfinished(directory):
    """Removes what a save left behind that did not come to its end."""
    for name in tf.io.gfile.listdir(directory):
        if re.fullmatch(r"ckpt-\d+_temp_[0-9a-f]{8}/?", name):
            tf.io.gfile.rmtree(os.path.join(directory, name))


def _register(directory, prefix, keep):
    """Puts the new checkpoint into the `checkpoint` file; removes old ones."""
    state = tf.train.get_checkpoint_state(directory)
    known = list(state.all_model_checkpoint_paths) if state else []
    paths = [p for p in known if os.path.basename(p) != os.path.basename(prefix)]
    paths.append(prefix)
    gone, paths = paths[:-keep], paths[-keep:]
    compat.update_checkpoint_state(
        directory,
        os.path.basename(prefix),
        [os.path.basename(p) for p in paths],
    )
    for path in gone:
        for name in tf.io.gfile.glob(f"{path}.index") + tf.io.gfile.glob(
            f"{path}.data-*"
        ):
            tf.io.gfile.remove(name)


def latest(directory):
    """Path of the newest checkpoint in `directory` that is there, or None."""
    state = tf.train.get_checkpoint_state(directory)
    # Not `tf.train.latest_checkpoint`, which gives None if someone has removed the
    # newest one, so that training would begin again and push out the others.
    for path in reversed(state.all_model_checkpoint_paths if state else []):
        if tf.io.gfile.exists(f"{path}.index") or tf.io.gfile.exists(path):
            return path
    return None


def read_step(path):
    """The global step of a checkpoint as an int.

    Raises:
        UsageError: the file is not one of pstrain's.
    """
    reader = tf.train.load_checkpoint(path)
    if not reader.has_tensor(STEP):
        raise UsageError(
            "the model directory holds a checkpoint that pstrain did not write; "
            f"received: {path}; give another --model_dir"
        )
    return int(reader.get_tensor(STEP))


def restore(path, parts, local_keys):
    """Reads a checkpoint back into the variables on the ps.

    Args:
        path: str, as `latest` gives.
        parts: list of `Part` of the present cluster.
        local_keys: list of str, what the coordinator wants of its own.

    Returns:
        Dict from each of `local_keys` that the checkpoint has to its value.

    Raises:
        UsageError: the checkpoint is of another model; nothing was changed.
    """
    reader = tf.train.load_checkpoint(path)
    _compare(path, reader, parts)
    by_device = _by_device(parts)

    def read(device, group):
        with tf.device(device):
            slices = [s for part in group for s in part.slices]
            tensors = tf.raw_ops.RestoreV2(
                prefix=path,
                tensor_names=[s.key for s in slices],
                shape_and_slices=[s.spec for s in slices],
                dtypes=[s.saved_dtype for s in slices],
            )
            tensors = [
                tf.cast(t, s.dtype) for t, s in zip(tensors, slices, strict=True)
            ]
            for part in group:
                part.write(tensors[: len(part.slices)])
                tensors = tensors[len(part.slices) :]

    _in_parallel(read, list(by_device.items()))
    return {key: reader.get_tensor(key) for key in local_keys if reader.has_tensor(key)}


def _compare(path, reader, parts):
    """Names what differs between a checkpoint and the model."""
    shapes = reader.get_variable_to_shape_map()
    dtypes = reader.get_variable_to_dtype_map()
    wanted = {s.key: s for part in parts for s in part.slices}
    # Variables that only the coordinator holds (seeds) are optional both ways.
    saved = {key for key in shapes if not key.startswith(("pstrain/", "seeds/"))}
    saved.discard(LEARNING_RATE)
    problems = [f"{key} is not in the model" for key in saved if key not in wanted]
    for key, one in wanted.items():
        if key not in shapes:
            problems.append(f"{key} is missing")
        elif shapes[key] != list(one.shape):
            shape = list(one.shape)
            problems.append(f"{key} has shape {shapes[key]} instead of {shape}")
        elif dtypes[key] != one.saved_dtype:
            found, dtype = dtypes[key].name, one.saved_dtype.name
            problems.append(f"{key} has dtype {found} instead of {dtype}")
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise UsageError(
            "the model directory holds a checkpoint of another model; received: "
            f"{path}, in which {'; '.join(sorted(problems)[:4])}{more}; give "
            "another --model_dir or the settings it was trained with"
        )


def _by_device(parts):
    groups = {}
    for part in parts:
        groups.setdefault(part.device, []).append(part)
    return groups


def _in_parallel(function, calls):
    """Runs `function(*call)` for each call at the same time, waits for all."""
    with concurrent.futures.ThreadPoolExecutor(max(1, len(calls))) as pool:
        for job in [pool.submit(function, *call) for call in calls]:
            job.result()


def _first_line(error):
    return str(error).strip().splitlines()[0][:200]
