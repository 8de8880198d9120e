"""The TF data service for Horovod: compute workers prepare the data that ranks train on.

A training script reads the `TfDataServiceConfig` that `compute_worker` wrote, and sends its dataset
to the workers: with `send_to_data_service` if the workers run the dispatchers, and inside
`tf_data_service` if the training processes do. A worker runs `compute_worker_fn`. All of them
register at the authenticated `ComputeService`. Datasets and elements then travel between
TensorFlow's own servers, which have no authentication (see `listening`).
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.common.logging import get_logger
from horovod.common.wire import check_key
from horovod.runner.compute_service import Addresses, ComputeClient
from horovod.tensorflow.data.listening import restrict_to
from horovod.tensorflow.functions import allgather_object

SIDES = ("compute", "training")
_POLL_SECONDS = 1.0
_JOB_NAME = "job"

_service = tf.data.experimental.service


@dataclass(frozen=True)
class TfDataServiceConfig:
    """The configuration that training processes and compute workers share.

    A process with the key can take part, so keep files with a configuration private.

    Args:
        dispatchers: The number of dispatchers.
        workers_per_dispatcher: The number of workers of each dispatcher.
        dispatcher_side: "compute" or "training": which processes run the dispatchers.
        addresses: The endpoints of the compute service, by network interface.
        key: The secret key of the compute service.
        timeout: The number of seconds that a process waits for others; 60 by default.

    Raises:
        ValueError: `dispatcher_side` or `key` is wrong.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Addresses
    key: bytes = field(repr=False)
    timeout: int = 60

    def __post_init__(self) -> None:
        if self.dispatcher_side not in SIDES:
            raise ValueError(
                f"dispatcher_side must be 'compute' or 'training', not {self.dispatcher_side!r}"
            )
        check_key(self.key)

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Return a new connection to the compute service; `verbose` is its level of messages."""
        return ComputeClient(self.addresses, self.key, verbose=verbose)

    def to_dict(self) -> dict[str, Any]:
        """Return this configuration as a dictionary for JSON, with the key in hexadecimal."""
        return {**asdict(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        values = {each.name: config[each.name] for each in fields(TfDataServiceConfig)}
        values["key"] = bytes.fromhex(config["key"])
        values["addresses"] = {
            nic: [(str(address), int(port)) for address, port in endpoints]
            for nic, endpoints in config["addresses"].items()
        }
        return TfDataServiceConfig(**values)

    def write(self, filename: str | os.PathLike[str]) -> None:
        """Write the file `filename`, which only this user can read, in one atomic step."""
        path = os.path.abspath(filename)
        fd, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".tf_data_service_")
        try:
            with open(fd, "w", encoding="utf-8") as file:
                json.dump(self.to_dict(), file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @staticmethod
    def read(
        filename: str | os.PathLike[str], wait_for_file_creation: bool = False
    ) -> TfDataServiceConfig:
        """Read a file that `write` wrote, once it exists if `wait_for_file_creation` is True."""
        while wait_for_file_creation and not os.path.exists(filename):
            time.sleep(_POLL_SECONDS)
        with open(filename, encoding="utf-8") as file:
            return TfDataServiceConfig.from_dict(json.load(file))


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Yield the address of this training rank's dispatcher, once all its workers have registered.

    Pass it as ``service`` to `tf.data.experimental.service.distribute`. A dispatcher on the
    training side runs inside this block: in every rank, or in rank 0 if there is only one. In that
    case rank 0 leaves the block together with the other ranks.

    Args:
        compute_config: The configuration that `compute_worker` wrote.
        rank: The rank of this process.

    Yields:
        The address, as ``protocol://address:port``.
    """
    on_training_side = compute_config.dispatcher_side == "training"
    is_shared = compute_config.dispatchers == 1
    if is_shared or not on_training_side:
        dispatcher_id = rank % compute_config.dispatchers
    else:
        dispatcher_id = rank
    with ExitStack() as stack:
        compute = compute_config.compute_client()
        stack.callback(compute.close)
        if on_training_side and (rank == 0 or not is_shared):
            address = stack.enter_context(_dispatcher(compute.own_address))
            compute.register_dispatcher(dispatcher_id, address)
        address = compute.wait_for_dispatcher_registration(dispatcher_id, compute_config.timeout)
        compute.wait_for_dispatcher_worker_registration(dispatcher_id, compute_config.timeout)
        yield address
        if on_training_side and is_shared and hvd.is_initialized():
            # Wait for the other ranks, which may still be reading from this dispatcher.
            allgather_object(rank, name="tf_data_service")


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """Return a dataset with the same elements, which compute workers process.

    It needs dispatchers on the compute side. It is also a method of `tf.data.Dataset`.

    Args:
        dataset: The dataset to process.
        compute_config: The configuration that `compute_worker` wrote.
        rank: The training rank that reads the dataset.
        size: The number of training ranks; needed with `round_robin` only.
        processing_mode: "distributed_epoch" (the default) divides the elements among the workers of
            a dispatcher; with "parallel_epochs" each worker processes all elements.
        reuse_dataset: Whether the ranks share one pass over the dataset, in which each element goes
            to one rank; otherwise (the default) each rank gets a pass of its own.
        round_robin: With `reuse_dataset`, whether the ranks take elements in turn. The dataset must
            then be infinite (``repeat()``). False by default.

    Returns:
        The processed dataset.

    Raises:
        RuntimeError: The dispatchers run on the training side.
        ValueError: `round_robin` is True and `size` is missing.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "the dispatchers of this data service run in the training processes, and must live as "
            "long as the dataset is read: use `with tf_data_service(compute_config, rank) as "
            "service:` and apply tf.data.experimental.service.distribute(service=service, ...)"
        )
    if round_robin and not reuse_dataset:
        get_logger(__name__).warning(
            "send_to_data_service: round_robin has no effect without reuse_dataset"
        )
    takes_turns = reuse_dataset and round_robin
    if takes_turns and size is None:
        raise ValueError("round_robin needs `size`, the number of ranks that take turns")
    with tf_data_service(compute_config, rank) as dispatcher_address:
        return dataset.apply(
            _service.distribute(
                processing_mode=processing_mode,
                service=dispatcher_address,
                job_name=_JOB_NAME if reuse_dataset else None,
                consumer_index=rank if takes_turns else None,
                num_consumers=size if takes_turns else None,
            )
        )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Run a compute worker on this rank until the compute service is shut down.

    Args:
        compute_config: The configuration that `compute_worker` wrote.
    """
    hvd.init()
    index = hvd.rank()
    dispatcher_id, worker_number = divmod(index, compute_config.workers_per_dispatcher)
    with ExitStack() as stack:
        compute = compute_config.compute_client()
        stack.callback(compute.close)
        if compute_config.dispatcher_side == "compute" and worker_number == 0:
            address = stack.enter_context(_dispatcher(compute.own_address))
            compute.register_dispatcher(dispatcher_id, address)
        address = compute.wait_for_dispatcher_registration(dispatcher_id, compute_config.timeout)
        stack.enter_context(_worker(address, compute.own_address, compute_config.timeout))
        compute.register_worker_for_dispatcher(dispatcher_id, index)
        compute.wait_for_shutdown()


@contextmanager
def _dispatcher(own_address: str) -> Iterator[str]:
    """Run a dispatcher, and yield its address as ``protocol://address:port``."""
    with restrict_to(own_address):
        server = _service.DispatchServer()
    try:
        protocol, _, local = server.target.partition("://")
        yield f"{protocol}://{_host(own_address)}:{local.rpartition(':')[2]}"
    finally:
        server.stop()


@contextmanager
def _worker(dispatcher_address: str, own_address: str, timeout: float) -> Iterator[None]:
    """Run a worker of this dispatcher."""
    protocol, _, address = dispatcher_address.partition("://")
    config = _service.WorkerConfig(
        dispatcher_address=address,
        worker_address=f"{_host(own_address)}:%port%",
        protocol=protocol,
        dispatcher_timeout_ms=int(1000 * timeout),
    )
    with restrict_to(own_address):
        server = _service.WorkerServer(config)
    try:
        yield
    finally:
        server.stop()


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
