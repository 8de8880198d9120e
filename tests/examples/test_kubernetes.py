"""The manifests of examples/kubernetes: their fields exist, and horovodrun knows their commands.

TrainJob, ClusterTrainingRuntime and JobSet are held to the models that Kubeflow publishes as the
package kubeflow-trainer-api, made from the OpenAPI of those kinds. No package has those of the MPI
operator's v2beta1: `MPI_JOB` is the part of its documented fields that the manifest uses or may
use, and its pods are held to the models as all pods are.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from horovod.runner.options.arguments import parse_args
from horovod.runner.slots.hosts import Host

models = pytest.importorskip(
    "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDER = EXAMPLES / "kubernetes"
MANIFESTS = {path.name: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yaml")}

REPLICAS = {"replicas": int, "restartPolicy": str, "template": dict}
MPI_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, "labels": dict},
    "spec": {
        "slotsPerWorker": int,
        "runLauncherAsWorker": bool,
        "launcherCreationPolicy": ("AtStartup", "WaitForWorkersReady"),
        "sshAuthMountPath": str,
        "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
        "runPolicy": {
            "cleanPodPolicy": ("None", "Running", "All"),
            "ttlSecondsAfterFinished": int,
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "suspend": bool,
        },
        "mpiReplicaSpecs": {"Launcher": REPLICAS, "Worker": REPLICAS},
    },
}
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
}
VERSIONS = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "ClusterTrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "MPIJob": "kubeflow.org/v2beta1",
}


def check(document: dict[str, Any]) -> None:
    """`ValueError` that names a field unless the document is one of its kind."""
    kind = document["kind"]
    assert document["apiVersion"] == VERSIONS[kind]
    if kind != "MPIJob":
        check_model(MODELS[kind], document)
        return
    check_fields(document, MPI_JOB, "")
    for replicas in document["spec"]["mpiReplicaSpecs"].values():
        check_model(models.IoK8sApiCoreV1PodTemplateSpec, replicas["template"])


def check_model(model: Any, document: dict[str, Any]) -> None:
    """What a model does not know it leaves out, and what has a wrong type it refuses."""
    known = json.loads(model.from_dict(document).to_json())
    check_kept(document, known, "")


def check_kept(given: Any, known: Any, place: str) -> None:
    if isinstance(given, dict):
        for name, value in given.items():
            if known is None or name not in known:
                raise ValueError(f"there is no field {place}.{name}")
            check_kept(value, known[name], f"{place}.{name}")
    elif isinstance(given, list):
        for index, value in enumerate(given):
            check_kept(value, known[index], f"{place}[{index}]")
    elif given != known:
        raise ValueError(f"{place} is {given!r}, and is read as {known!r}")


def check_fields(given: Any, wanted: Any, place: str) -> None:
    if isinstance(wanted, dict):
        for name, value in given.items():
            if name not in wanted:
                raise ValueError(f"there is no field {place}.{name}")
            check_fields(value, wanted[name], f"{place}.{name}")
    elif isinstance(wanted, tuple):
        if given not in wanted:
            raise ValueError(f"{place} is {given!r}, and not one of {wanted}")
    elif not isinstance(given, wanted):
        raise ValueError(f"{place} is {given!r}, and no {wanted.__name__}")


@pytest.mark.parametrize("name", MANIFESTS)
def test_fields_are_those_of_the_kind(name: str):
    check(MANIFESTS[name])


def mpi_policy(job: Any) -> None:
    job["spec"]["slotsPerWorkers"] = 2


def pod_field(job: Any) -> None:
    job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["container"] = []


def creation(job: Any) -> None:
    job["spec"]["launcherCreationPolicy"] = "Whenever"


def port(job: Any) -> None:
    worker = job["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    worker["spec"]["containers"][0]["readinessProbe"]["tcpsocket"] = {"port": 22}


def processes(job: Any) -> None:
    job["spec"]["trainer"]["numProcPerNode"] = "two"


def jobs(job: Any) -> None:
    job["spec"]["replicatedJobs"][1]["template"]["spec"]["paralelism"] = 2


@pytest.mark.parametrize(
    ("name", "spoil", "field"),
    [
        ("mpijob.yaml", mpi_policy, "slotsPerWorkers"),
        ("mpijob.yaml", pod_field, "container"),
        ("mpijob.yaml", creation, "launcherCreationPolicy"),
        ("trainer-runtime.yaml", port, "tcpsocket"),
        ("trainjob.yaml", processes, "numProcPerNode"),
        ("jobset.yaml", jobs, "paralelism"),
    ],
)
def test_a_mistake_would_be_noticed(name: str, spoil: Callable[[Any], None], field: str):
    spoilt = copy.deepcopy(MANIFESTS[name])
    spoil(spoilt)
    with pytest.raises(ValueError, match=field):
        check(spoilt)


# -- commands ------------------------------------------------------------------------------------


def containers(document: Any) -> list[dict[str, Any]]:
    """All containers of all pods, wherever the kind has them."""
    if isinstance(document, list):
        return [found for each in document for found in containers(each)]
    if not isinstance(document, dict):
        return []
    found = list(document.get("containers", []))
    if "runtimeRef" in document:
        found.append(document["trainer"])
    return found + [each for value in document.values() for each in containers(value)]


def words(container: dict[str, Any]) -> list[str]:
    return [*container["command"], *container.get("args", [])]


def test_scripts_are_in_the_image_and_programs_are_known():
    found = [words(each) for document in MANIFESTS.values() for each in containers(document)]
    assert len(found) == 7
    for command in found:
        assert command[0] in ("horovodrun", "/usr/sbin/sshd")
        if "python" in command:
            script, *given = command[command.index("python") + 1 :]
            source = (EXAMPLES / script).read_text()
            assert all(f'"{word}"' in source for word in given if word.startswith("--"))


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("mpijob.yaml", ["train-worker-0.train.default.svc", "train-worker-1.train.default.svc"]),
        ("trainjob.yaml", ["train-launcher-0-0.train", "train-node-0-0.train"]),
    ],
)
def test_launchers_find_hosts_slots_and_size(name: str, hosts: Sequence[str], tmp_path: Path):
    """In a hostfile as the operators write it for Open MPI."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{host} slots=2\n" for host in hosts))
    (launcher,) = (words(c) for c in containers(MANIFESTS[name]) if "horovodrun" in c["command"])
    options = parse_args(launcher[1:], {"OMPI_MCA_orte_default_hostfile": str(hostfile)})
    assert options.num_proc == 4
    assert options.hosts == [Host(host, 2) for host in hosts]
    assert options.command[0] == "python"


def test_pods_join_where_the_head_waits():
    job = MANIFESTS["jobset.yaml"]
    head, worker = containers(job)
    waiting = parse_args(words(head)[1:], {})
    joining = parse_args(
        [w.replace("$(POD_NAME)", "train-worker-0-0-x7k2p") for w in words(worker)[1:]], {}
    )
    name, first = job["metadata"]["name"], job["spec"]["replicatedJobs"][0]["name"]
    port = head["ports"][0]["containerPort"]
    assert waiting.listen[1] == port
    assert joining.join == (f"{name}-{first}-0-0.{name}", port)
    (host,) = joining.hosts
    pods = job["spec"]["replicatedJobs"][1]["template"]["spec"]["parallelism"]
    assert waiting.num_proc == pods * host.slots
    for options, container in ((waiting, head), (joining, worker)):
        folder, _, file = options.secret_file.rpartition("/")
        assert file == "key"  # as in the command that makes the secret
        (mount,) = container["volumeMounts"]
        assert (mount["mountPath"], mount["readOnly"]) == (folder, True)
    for replicated in job["spec"]["replicatedJobs"]:
        (volume,) = replicated["template"]["spec"]["template"]["spec"]["volumes"]
        assert volume["secret"] == {"secretName": "train-secret", "defaultMode": 0o400}
