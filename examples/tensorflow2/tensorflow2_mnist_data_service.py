"""Train on handwritten digits that other processes prepare: TensorFlow's data service.

    horovodrun -np 2 python -m horovod.tensorflow.data.compute_worker /tmp/service.json &
    horovodrun -np 2 python examples/tensorflow2/tensorflow2_mnist_data_service.py /tmp/service.json

The first command starts compute workers, which shuffle, shift and batch the images; the second
trains and, at its end, ends the workers. It works with dispatchers on either side (the first
command's `--dispatcher-side`). The data are the 1,797 digits that come with scikit-learn. Lines
that a single-process script would not have are marked "Horovod".
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.tensorflow as hvd
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configfile", help="the file given to the compute workers")
    parser.add_argument("--steps", type=int, default=500, help="steps of all processes together")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one process")
    parser.add_argument(
        "--reuse-dataset",
        action="store_true",
        help="share one stream of batches among all processes, instead of one for each",
    )
    parser.add_argument(
        "--round-robin", action="store_true", help="and have the processes take turns in it"
    )
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def load_data() -> tuple[tuple[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Training and test images with their labels."""
    digits = load_digits()
    images = (digits.images / 16).astype("float32")[..., None]
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    return (tf.constant(train_x), tf.constant(train_y)), (tf.constant(test_x), tf.constant(test_y))


def shifted(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Move an image by up to a pixel in each direction. This runs in the compute workers."""
    return tf.image.random_crop(tf.image.pad_to_bounding_box(image, 1, 1, 10, 10), [8, 8, 1]), label


@contextmanager
def prepared_elsewhere(
    dataset: tf.data.Dataset, config: TfDataServiceConfig, args: argparse.Namespace
) -> Iterator[tf.data.Dataset]:
    """The dataset as the compute workers deliver it."""
    rank, size = hvd.rank(), hvd.size()
    if config.dispatcher_side == "compute":
        yield dataset.send_to_data_service(
            config, rank, size, reuse_dataset=args.reuse_dataset, round_robin=args.round_robin
        )
        return
    # The dispatcher runs here, so it must stay until the training has ended.
    takes_turns = args.reuse_dataset and args.round_robin
    with tf_data_service(config, rank) as service:
        yield dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode="distributed_epoch",
                service=service,
                job_name="job" if args.reuse_dataset else None,
                consumer_index=rank if takes_turns else None,
                num_consumers=size if takes_turns else None,
            )
        )


def make_model() -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Conv2D(64, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )


def main() -> None:
    args = parse_arguments()
    hvd.init()  # Horovod: find the other processes
    tf.random.set_seed(args.seed)
    # Horovod: one GPU for each process.
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    say = print if hvd.rank() == 0 else lambda *_, **__: None

    train_data, (test_images, test_labels) = load_data()
    dataset = tf.data.Dataset.from_tensor_slices(train_data).repeat().shuffle(256)
    dataset = dataset.map(shifted, num_parallel_calls=tf.data.AUTOTUNE).batch(args.batch_size)
    model = make_model()
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam(args.lr)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        # Horovod: average the gradients over all processes.
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    # Horovod: wait for the compute workers.
    config = TfDataServiceConfig.read(args.configfile, wait_for_file_creation=True)
    with prepared_elsewhere(dataset, config, args) as batches:
        steps = args.steps // hvd.size()
        for step, (images, labels) in enumerate(batches.take(steps)):
            # Horovod: grows in a quarter of the steps to the rate of all processes.
            optimizer.learning_rate = args.lr * (1 + (hvd.size() - 1) * min(1.0, 4 * step / steps))
            loss = train_step(images, labels)
            if step == 0:  # Horovod: all go on from what rank 0 has
                hvd.broadcast_variables(model.variables, root_rank=0)
                hvd.broadcast_variables(optimizer.variables, root_rank=0)
            if step % 50 == 0:
                say(f"step {step}: loss {float(loss):.4f}", flush=True)

    correct = tf.argmax(model(test_images), axis=1) == test_labels
    say(f"test accuracy {float(tf.reduce_mean(tf.cast(correct, tf.float32))):.2%}", flush=True)
    hvd.join()  # Horovod: once all have read their last batch,
    if hvd.rank() == 0:  # the compute workers may go
        config.compute_client().shutdown()


if __name__ == "__main__":
    main()
