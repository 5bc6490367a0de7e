"""What an input function is told about the worker it feeds.

Under `ParameterServerStrategy` TensorFlow tells every worker that it is input
pipeline 0 of 1, so all of them would read the same examples in the same order.
pstrain calls the experiment's input function once per worker with the true
numbers instead.
"""

import dataclasses

from pstrain.errors import UsageError


@dataclasses.dataclass(frozen=True)
class InputContext:
    """The share of the input that one worker reads.

    Example:

    ```python
    def train_data(context):
        files = sorted(tf.io.gfile.glob("data/*.tfrecord"))
        ds = tf.data.Dataset.from_tensor_slices(files)
        ds = ds.shard(context.num_workers, context.worker_index)
        ds = ds.shuffle(len(files), seed=context.seed + context.worker_index)
        ...
    ```

    Attributes:
        worker_index: int, this worker, from 0.
        num_workers: int, how many workers share the input.
        seed: int, the seed of the whole run (`--seed`).
    """

    worker_index: int = 0
    num_workers: int = 1
    seed: int = 0


def dataset_functions(input_fn, num_workers, seed):
    """The input function of every worker as a `tf.function` without arguments.

    Args:
        input_fn: callable of `InputContext` that returns a batched
            `tf.data.Dataset`.
        num_workers: int.
        seed: int.

    Returns:
        `(functions, element_spec)`: a list of `tf.function`, one a worker, and the
        structure of one batch, which must be the same for all.

    Raises:
        UsageError: the function gives no dataset, or unequal structures.
    """
    import tensorflow as tf

    functions, specs = [], []
    for index in range(num_workers):
        context = InputContext(index, num_workers, seed)
        function = tf.function(lambda c=context: input_fn(c), autograph=False)
        dataset = function.get_concrete_function().structured_outputs
        if not isinstance(dataset, tf.data.Dataset):
            raise UsageError(
                "the input function must return a tf.data.Dataset; received: "
                f"{type(dataset).__name__}"
            )
        functions.append(function)
        specs.append(dataset.element_spec)
    if any(spec != specs[0] for spec in specs):
        raise UsageError(
            "the input function must give every worker batches of one structure; "
            f"received: {specs[0]} for worker 0 and another one for a later worker; "
            "batch with drop_remainder=True or keep dimensions unknown"
        )
    return functions, specs[0]
