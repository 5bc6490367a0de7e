"""What an input function is told about the worker it feeds.

Under `ParameterServerStrategy` TensorFlow tells every worker that it is input
pipeline 0 of 1, so all of them would read the same examples in the same order.
pstrain calls the experiment's input function once per worker with the true
numbers instead.
"""

import dataclasses


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
