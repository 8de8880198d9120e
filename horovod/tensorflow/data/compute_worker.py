"""The command that starts compute workers: `python -m horovod.tensorflow.data.compute_worker`.

Every rank becomes one worker. Rank 0 also runs the compute service, where workers and training
processes meet, and writes a file that tells training processes how to find it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import horovod.tensorflow as hvd
from horovod.common.config import Config
from horovod.common.joining.addresses import LOOPBACK, routable_address
from horovod.common.wire import new_key
from horovod.runner.compute_service import ComputeService
from horovod.tensorflow.data.compute_service import SIDES, TfDataServiceConfig, compute_worker_fn
from horovod.tensorflow.functions import allgather_object, broadcast_object

_DESCRIPTION = """\
Run workers of TensorFlow's data service: processes that read, decode and augment data, so that
training processes, on this or other hosts, only train. Start one for each core or host to use:

  horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker /shared/data_service.json
  horovodrun -np 2 python train.py /shared/data_service.json

where train.py does

  config = TfDataServiceConfig.read(path, wait_for_file_creation=True)
  dataset = dataset.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)

and, when it has finished, on rank 0: config.compute_client().shutdown(), which ends the workers.
"""
_EPILOG = """\
When all workers are on one host, only processes of that host reach them; set HOROVOD_GLOO_IFACE to
a network interface to serve training processes on other hosts. TensorFlow's data service
authenticates nobody and runs what it is sent: serve networks that you trust.
"""


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Run one compute worker on every rank, until the training ends the service."""
    hvd.init()
    if hvd.size() % dispatchers:
        raise ValueError(
            f"the number of workers must be a multiple of the number of dispatchers, but "
            f"{hvd.size()} workers were started for {dispatchers} dispatchers"
        )
    config, service = None, None
    try:
        if hvd.rank() == 0:
            key = new_key()
            per_dispatcher = hvd.size() // dispatchers
            service = ComputeService(dispatchers, per_dispatcher, key, nics=[_address()])
            config = TfDataServiceConfig(
                dispatchers, per_dispatcher, dispatcher_side, service.addresses(), key, timeout
            )
            config.write(configfile)
            print(
                f"TF data service with {hvd.size()} worker(s) and {dispatchers} dispatcher(s) on "
                f"the {dispatcher_side} side; training processes find it through {configfile}",
                flush=True,
            )
        config = broadcast_object(config, name="TfDataServiceConfig")
        compute_worker_fn(config)
        allgather_object(hvd.rank(), name="compute workers have ended")
    finally:
        if service is not None:
            remove_configuration(configfile, config)
            service.shutdown()


def _address() -> str:
    """Return rank 0's address: of the user's interface, loopback on one host, or routable."""
    interface = Config.from_env().gloo_iface
    if not interface and hvd.local_size() == hvd.size():
        return LOOPBACK
    return routable_address(interface)


def remove_configuration(configfile: str, config: TfDataServiceConfig | None) -> None:
    """Remove the file, so that no training waits for workers that have ended.

    Args:
        configfile: The path of the file.
        config: The configuration that this job wrote; a file with another one stays.
    """
    try:
        if TfDataServiceConfig.read(configfile) == config:
            os.unlink(configfile)
    except (OSError, ValueError, KeyError):
        pass  # the file was never written, or belongs to another job now


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Make a parser with the arguments that all commands for compute workers share.

    Args:
        prog: The name of the command.
        description: The description for its help.

    Returns:
        The parser.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "configfile",
        metavar="CONFIGFILE",
        help="file that tells training processes where the workers are; they must be able to read "
        "it. It holds a key, so only this user can, and it goes away when the workers end",
    )
    parser.add_argument(
        "--dispatchers",
        type=_positive,
        default=1,
        help="among how many dispatchers the workers are divided, evenly. One serves all training "
        "processes; as many as there are training processes give each its own workers (default: 1)",
    )
    parser.add_argument(
        "--dispatcher-side",
        choices=SIDES,
        default="compute",
        help="where dispatchers run: in compute workers, or in training processes, which then use "
        "tf_data_service() instead of send_to_data_service() (default: compute)",
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"must be larger than 0, not {number}")
    return number


def run_commandline(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("python -m horovod.tensorflow.data.compute_worker", _DESCRIPTION)
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=60,
        help="seconds that workers and training processes wait for each other (default: 60)",
    )
    given = parser.parse_args(arguments)
    main(given.dispatchers, given.dispatcher_side, given.configfile, given.timeout)


if __name__ == "__main__":
    run_commandline()
