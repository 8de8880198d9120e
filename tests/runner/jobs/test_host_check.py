"""horovodrun --check as typed, on this machine and through a stub for ssh."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.runner import stub_ssh
from tests.runner.horovodrun import HANG, run

PATIENT = ["--start-timeout", str(HANG)]  # however busy this machine is


def test_hosts_that_fail_do_not_keep_the_others_from_being_checked(tmp_path: Path):
    stub = stub_ssh.install(tmp_path)
    (tmp_path / "train.py").touch()
    hosts = "alpha:2,unknown1:2,stranger:2,pythonless:2,beta"
    command = (sys.executable, "train.py")
    done = run("--check", *PATIENT, "-H", hosts, *command, env=stub, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    rows = {row.split()[0]: row.split()[1] for row in done.stdout.splitlines()[1:6]}
    lost = dict.fromkeys(("unknown1", "stranger", "pythonless"), "no")
    assert rows == {"alpha": "ssh", "beta": "ssh", **lost}
    said = " ".join(done.stdout.split())
    assert "cannot start on unknown1: ssh: Could not resolve hostname unknown1" in said
    assert "Host key verification failed. Log in once by hand and check its key" in said
    assert "cannot start on pythonless: " in said
    assert "train.py, which the command needs" not in said


def test_inside_an_allocation_nothing_need_be_said():
    slurm = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "localhost,127.0.0.2", "SLURM_NTASKS": "2"}
    done = run("--check", *PATIENT, env=slurm)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "horovodrun: Slurm job 5: 2 nodes, 2 slots\n" in done.stderr
    assert "both ways" in done.stdout
    assert done.stdout.endswith("A job can run on these 2 hosts.\n")


def test_a_missing_script_is_told(tmp_path: Path):
    done = run("--check", *PATIENT, sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "train.py, which the command needs, is missing on localhost" in done.stdout


def test_only_programs_and_scripts_of_python_must_be_there(tmp_path: Path):
    command = ("NAME=VALUE", "env", "echo", "no-file")
    done = run("-np", "1", "--check", *PATIENT, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    command = ("NAME=VALUE", sys.executable, "train.py")
    done = run("-np", "1", "--check", *PATIENT, *command, cwd=tmp_path)
    assert "train.py, which the command needs, is missing on localhost" in done.stdout
    assert "NAME" not in done.stdout


def test_hosts_of_a_discovery_script(tmp_path: Path):
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)
    done = run("--check", *PATIENT, "--host-discovery-script", str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    script.write_text("#!/bin/sh\necho trouble >&2; exit 3\n")
    done = run("--check", *PATIENT, "--host-discovery-script", str(script))
    assert done.returncode == 1
    assert "the discovery script gives no hosts: " in done.stderr
    assert "trouble" in done.stderr
