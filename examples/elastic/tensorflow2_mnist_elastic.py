"""Train on handwritten digits, with a loop of its own, while processes and hosts come and go.

    horovodrun -np 2 --min-np 1 --max-np 4 -H localhost:4 \\
        python examples/elastic/tensorflow2_mnist_elastic.py
    horovodrun -np 2 --min-np 2 --host-discovery-script ./hosts \\
        python examples/elastic/tensorflow2_mnist_elastic.py

Kill one of its processes (`kill -9`) and watch the others go on. It also runs as it is under plain
horovodrun or alone. The data are the 1,797 images that come with scikit-learn. Lines that exist
because of elastic training are marked "Elastic".
"""

from __future__ import annotations

import argparse
import sys

import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.tensorflow as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--steps-per-epoch", type=int, default=100, help="of all together")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--batches-per-commit", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one process")
    parser.add_argument(
        "--target-accuracy", type=float, help="exit with status 1 if the result is below (0 to 1)"
    )
    return parser.parse_args()


def load_data() -> list:
    """Images for training and for tests, then the labels of both."""
    digits = load_digits()
    images = (digits.images / 16).astype("float32")[..., None]
    return train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )


def make_model() -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dropout(0.25),
            tf.keras.layers.Dense(10),
        ]
    )


def main() -> int:
    args = parse_arguments()
    # Elastic: before init, what a new process may do while the others train.
    train_images, test_images, train_labels, test_labels = load_data()
    dataset = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
    dataset = dataset.repeat().shuffle(2000).batch(args.batch_size)

    hvd.init()  # Horovod: find the other processes
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:  # Horovod: one GPU for each process
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    model = make_model()
    optimizer = tf.keras.optimizers.Adam(args.lr)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function  # Elastic: traced once, it goes on working when the processes have changed
    def train_batch(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)  # Horovod: average the gradients
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @hvd.elastic.run  # Elastic: comes back here when the processes have changed
    def train(state: hvd.elastic.TensorFlowKerasState) -> None:
        while state.epoch < args.epochs:
            # Horovod: more images in a step allow a larger learning rate, after three epochs.
            progress = min(1.0, state.epoch / 3)
            optimizer.learning_rate = args.lr * (1 + (hvd.size() - 1) * progress)
            steps = args.steps_per_epoch // hvd.size()
            loss = None
            for images, labels in dataset.take(max(steps - state.batch, 0)):
                loss = train_batch(images, labels)
                hvd.stats.log(loss=loss)  # for `horovodrun --dashboard`
                state.batch += 1
                # Elastic: from time to time remember where we are.
                if state.batch % args.batches_per_commit == 0:
                    state.commit()
            if hvd.rank() == 0 and loss is not None:
                text = f"loss {float(loss):.4f} with {hvd.size()} process(es)"
                print(f"epoch {state.epoch + 1:2}: {text}", flush=True)
            state.epoch += 1
            state.batch = 0
            state.commit()

    # Elastic: all that training needs to go on; what is not in it is lost with a process.
    train(hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, batch=0))
    correct = tf.argmax(model(test_images), axis=1) == test_labels
    accuracy = float(tf.reduce_mean(tf.cast(correct, tf.float32)))
    if hvd.rank() == 0:
        print(f"final test accuracy: {accuracy:.2%} with {hvd.size()} process(es)", flush=True)
    return int(args.target_accuracy is not None and accuracy < args.target_accuracy)


if __name__ == "__main__":
    sys.exit(main())
