"""The TF data service: configuration, dispatchers on either side, and the command."""

from __future__ import annotations

import io
import os
import runpy
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.common.wire import new_key
from horovod.runner.compute_service import ComputeService
from tests.effort import examples
from tests.hosts import Hosts, host_address
from tests.hosts import available as hosts_available
from tests.ranks import RankPool, start_ranks

LONG = 240.0
COUNT = 40
pytestmark = pytest.mark.timeout(900)  # some tests wait as long as that several times
MODULE = "horovod.tensorflow.data.compute_worker"
EXAMPLE = (
    Path(__file__).parents[2] / "examples" / "tensorflow2" / "tensorflow2_mnist_data_service.py"
)


# Run on the ranks, which have TensorFlow loaded.


def _config(description: dict[str, Any]) -> Any:
    from horovod.tensorflow.data.compute_service import TfDataServiceConfig

    return TfDataServiceConfig.from_dict(description)


def _squares(config: Any, **how: Any) -> list[int]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    dataset = tf.data.Dataset.range(COUNT).map(lambda x: x * x)
    dataset = dataset.send_to_data_service(config, hvd.rank(), hvd.size(), **how)
    return [int(element) for element in dataset]


@contextmanager
def _as_compute_worker_too(config: Any) -> Iterator[None]:
    """Let this rank be a compute worker in a thread of its own; rank 0 ends the service."""
    import horovod.tensorflow as hvd
    from horovod.tensorflow.data.compute_service import compute_worker_fn
    from horovod.tensorflow.functions import allgather_object

    failures: list[BaseException] = []

    def work() -> None:
        try:
            compute_worker_fn(config)
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    yield
    allgather_object(None, name="all have read")
    if hvd.rank() == 0:
        config.compute_client().shutdown()
    worker.join(LONG)
    assert not worker.is_alive()
    assert failures == []


# Tests


def test_configuration(tf_pool2: RankPool, tmp_path: Path):
    def check() -> None:
        from horovod.tensorflow.data.compute_service import TfDataServiceConfig

        @settings(max_examples=examples(50), deadline=None, database=None)
        @given(
            dispatchers=st.integers(1, 9),
            workers_per_dispatcher=st.integers(1, 9),
            dispatcher_side=st.sampled_from(["compute", "training"]),
            addresses=st.dictionaries(
                st.text(), st.lists(st.tuples(st.text(), st.integers(1, 65535)))
            ),
            key=st.binary(min_size=32, max_size=32),
            timeout=st.integers(1, 1000),
        )
        def survives(**fields: Any) -> None:
            config = TfDataServiceConfig(**fields)
            assert TfDataServiceConfig.from_dict(config.to_dict()) == config
            config.write(path)
            assert TfDataServiceConfig.read(path) == config
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            assert fields["key"].hex() not in repr(config)
            assert repr(fields["key"]) not in repr(config)

        folder = tmp_path / str(os.getpid())
        folder.mkdir()
        path = folder / "service.json"
        path.write_text("open to all")
        path.chmod(0o666)
        survives()
        assert os.listdir(folder) == [path.name]

        good = TfDataServiceConfig.read(path)
        with pytest.raises(ValueError, match="not 'elsewhere'"):
            TfDataServiceConfig.from_dict({**good.to_dict(), "dispatcher_side": "elsewhere"})
        with pytest.raises(ValueError, match="32 bytes"):
            TfDataServiceConfig.from_dict({**good.to_dict(), "key": "00"})
        with pytest.raises(AttributeError):
            good.timeout = 1
        with pytest.raises(FileNotFoundError):
            TfDataServiceConfig.read(folder / "none.json")
        with pytest.raises(FileNotFoundError):
            good.write(folder / "no folder" / "file.json")

        # Somebody who waits for the file sees all of it, however early they come.
        later = folder / "later.json"
        seen: list[TfDataServiceConfig] = []
        reader = threading.Thread(
            target=lambda: seen.append(TfDataServiceConfig.read(later, wait_for_file_creation=True))
        )
        reader.start()
        good.write(later)
        reader.join(LONG)
        assert seen == [good]

    tf_pool2.run(check, timeout=LONG)


def test_bad_requests_are_explained(tf_pool2: RankPool):
    def check() -> None:
        import tensorflow as tf

        from horovod.tensorflow.data.compute_service import TfDataServiceConfig

        def config(side: str) -> TfDataServiceConfig:
            return TfDataServiceConfig(2, 1, side, {}, key)

        dataset = tf.data.Dataset.range(4)
        with pytest.raises(RuntimeError, match="tf_data_service"):
            dataset.send_to_data_service(config("training"), 0)
        with pytest.raises(ValueError, match="size"):
            dataset.send_to_data_service(config("compute"), 0, reuse_dataset=True, round_robin=True)

    key = new_key()
    tf_pool2.run(check, timeout=LONG)


def _reaching(port: int) -> list[str]:
    """Under which of some addresses of this host somebody answers."""

    def reaches(address: str) -> bool:
        try:
            socket.create_connection((address, port), timeout=0.5).close()
            return True
        except OSError:
            return False

    addresses = ("127.0.0.1", "127.0.0.2", "::1")
    with ThreadPoolExecutor() as threads:
        answers = threads.map(reaches, addresses)
        return [address for address, answer in zip(addresses, answers, strict=True) if answer]


def test_servers_answer_at_the_chosen_address_alone(tf_pool2: RankPool):
    def everywhere() -> socket.socket:
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)

    def check() -> None:
        from horovod.tensorflow.data.compute_service import _dispatcher
        from horovod.tensorflow.data.listening import restrict_to

        with everywhere() as before:
            for chosen in ("127.0.0.1", "127.0.0.2", "::1"):
                with restrict_to(chosen):
                    inside = everywhere()
                with inside:
                    assert _reaching(inside.getsockname()[1]) == [chosen]
            assert _reaching(before.getsockname()[1]) == ["127.0.0.1", "127.0.0.2", "::1"]
        with _dispatcher("127.0.0.2") as service:
            address, _, port = service.rpartition(":")
            assert address == "grpc://127.0.0.2"
            assert _reaching(int(port)) == ["127.0.0.2"]

    tf_pool2.run(check, timeout=LONG)


@pytest.fixture
def describe() -> Iterator[Any]:
    """Start compute services; the description of their configuration."""
    services = []

    def start(dispatchers: int, workers_per_dispatcher: int, side: str) -> dict[str, Any]:
        key = new_key()
        services.append(ComputeService(dispatchers, workers_per_dispatcher, key))
        return {
            "dispatchers": dispatchers,
            "workers_per_dispatcher": workers_per_dispatcher,
            "dispatcher_side": side,
            "addresses": services[-1].addresses(),
            "key": key.hex(),
            "timeout": 200,
        }

    yield start
    for service in services:
        service.shutdown()


def _train_beside_dispatcher(description: dict[str, Any], job_name: str | None) -> list[int]:
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.tensorflow.data.compute_service import tf_data_service

    service = tf.data.experimental.service
    config = _config(description)
    with _as_compute_worker_too(config), tf_data_service(config, hvd.rank()) as address:
        dataset = tf.data.Dataset.range(COUNT).apply(
            service.distribute("distributed_epoch", address, job_name=job_name)
        )
        return [int(element) for element in dataset]


def test_one_dispatcher_on_the_training_side(tf_pool2: RankPool, describe: Any):
    seen = tf_pool2.run(_train_beside_dispatcher, describe(1, 2, "training"), "job", timeout=LONG)
    assert sorted(seen[0] + seen[1]) == list(range(COUNT))


def test_a_dispatcher_in_each_training_rank(tf_pool2: RankPool, describe: Any):
    seen = tf_pool2.run(_train_beside_dispatcher, describe(2, 1, "training"), None, timeout=LONG)
    assert [sorted(each) for each in seen] == [list(range(COUNT))] * 2


def test_several_dispatchers_on_the_compute_side(tf_pool2: RankPool, describe: Any):
    def train(description: dict[str, Any]) -> list[int]:
        config = _config(description)
        with _as_compute_worker_too(config):
            return _squares(config)

    seen = tf_pool2.run(train, describe(2, 1, "compute"), timeout=LONG)
    assert [sorted(each) for each in seen] == [[x * x for x in range(COUNT)]] * 2


@pytest.mark.parametrize("processing_mode", ["distributed_epoch", "parallel_epochs"])
def test_ranks_take_turns(tf_pool2: RankPool, describe: Any, processing_mode: str):
    def train(description: dict[str, Any]) -> list[int]:
        import tensorflow as tf

        import horovod.tensorflow as hvd

        config = _config(description)
        with _as_compute_worker_too(config):
            dataset = tf.data.Dataset.range(COUNT).repeat()
            dataset = dataset.send_to_data_service(
                config,
                hvd.rank(),
                hvd.size(),
                processing_mode=processing_mode,
                reuse_dataset=True,
                round_robin=True,
            )
            return [int(element) for element in dataset.take(COUNT // 2)]

    seen = tf_pool2.run(train, describe(1, 2, "compute"), timeout=LONG)
    assert [len(each) for each in seen] == [COUNT // 2] * 2
    assert set(seen[0] + seen[1]) <= set(range(COUNT))
    if processing_mode == "parallel_epochs":  # each worker counts for itself, in order
        assert seen[1] == [element + 1 for element in seen[0]]


def _run_module(rank: int, size: int, name: str, *arguments: str) -> None:
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_script(rank: int, size: int, path: Path, *arguments: str) -> None:
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")


def test_compute_workers_as_processes_and_the_example(tf_pool2: RankPool, tmp_path: Path):
    path = tmp_path / "data_service.json"

    def train() -> list[list[int]]:
        from horovod.tensorflow.data.compute_service import TfDataServiceConfig

        config = TfDataServiceConfig.read(path, wait_for_file_creation=True)
        assert config.timeout == 200
        assert [doors[0][0] for doors in config.addresses.values()] == ["127.0.0.1"]
        return [
            _squares(config, reuse_dataset=True),
            _squares(config, processing_mode="parallel_epochs"),
            _squares(config),
        ]

    squares = [x * x for x in range(COUNT)]
    with start_ranks(_run_module, 2, MODULE, str(path), "--timeout", "200") as workers:
        (shared, parallel, own), (shared1, parallel1, own1) = tf_pool2.run(train, timeout=LONG)
        assert sorted(shared + shared1) == squares
        assert sorted(own) == sorted(own1) == squares
        assert sorted(parallel) == sorted(parallel1) == sorted(2 * squares)  # once by each worker
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with start_ranks(_run_script, 2, EXAMPLE, str(path), "--steps", "8") as training:
            training.results(timeout=LONG)
            assert "test accuracy" in training.output(0)
        workers.results(timeout=LONG)  # the example ends them
        assert "2 worker(s) and 1 dispatcher(s) on the compute side" in workers.output(0)
    assert not path.exists()


def _serve_and_train(rank: int, size: int, path: Path) -> list[int]:
    """On each of two hosts: a compute worker in a thread of its own, and a training rank."""
    import horovod.tensorflow as hvd
    from horovod.tensorflow.data.compute_service import TfDataServiceConfig
    from horovod.tensorflow.data.compute_worker import main
    from horovod.tensorflow.functions import allgather_object

    hvd.init()
    worker = threading.Thread(target=main, args=(1, "compute", str(path), 200))
    worker.start()
    config = TfDataServiceConfig.read(path, wait_for_file_creation=True)
    compute = config.compute_client()
    assert compute.own_address == host_address(rank)
    assert [doors[0][0] for doors in config.addresses.values()] == [host_address(0)]
    service = compute.wait_for_dispatcher_registration(0, LONG)
    host, _, port = service.removeprefix("grpc://").rpartition(":")
    assert host == host_address(0)
    assert _reaching(int(port)) == []  # on loopback nobody answers
    elements = _squares(config, reuse_dataset=True)
    allgather_object(None, name="all have read")
    if rank == 0:
        compute.shutdown()
    worker.join(LONG)
    assert not worker.is_alive()
    return elements


def test_two_hosts(tmp_path: Path):
    reason = hosts_available()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(2) as hosts:
        seen = hosts.run(_serve_and_train, [1, 1], tmp_path / "service.json", timeout=LONG)
    assert os.listdir(tmp_path) == []
    assert sorted(seen[0] + seen[1]) == [x * x for x in range(COUNT)]


def test_the_command_explains_itself_and_its_errors(tf_pool2: RankPool):
    def check() -> None:
        from horovod.tensorflow.data.compute_worker import main, run_commandline

        def told(*arguments: str) -> str:
            out = io.StringIO()
            with redirect_stdout(out), redirect_stderr(out), pytest.raises(SystemExit):
                run_commandline(arguments)
            return out.getvalue()

        text = told("--help")
        for word in ("horovodrun -np", "CONFIGFILE", "send_to_data_service", "--timeout"):
            assert word in text
        assert "required: CONFIGFILE" in told()
        assert "larger than 0" in told("file", "--dispatchers", "0")
        assert "invalid choice" in told("file", "--dispatcher-side", "somewhere")
        with pytest.raises(ValueError, match="2 workers were started for 3 dispatchers"):
            main(3, "compute", "/nowhere/file", 60)

    tf_pool2.run(check, timeout=LONG)
