"""Everything of the runner that the launchers for Spark and Ray use: their only door to it.

`tests/test_layers.py` refuses other imports of `horovod.runner` in `horovod.spark` and
`horovod.ray`. The names are not for users' programs.
"""

from __future__ import annotations

from horovod.runner.agents.agent_set import AgentSet, WorkerRequest
from horovod.runner.agents.channel import ChannelLink, LinkChannel, Relay, connect
from horovod.runner.agents.controller import HostSet, JobController, assignment_variables
from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.agents.link_server import LinkServer
from horovod.runner.agents.probe import interface_address, keep_port, probe
from horovod.runner.agents.store_endpoints import StoreEndpoints, describe_problem, own_interfaces
from horovod.runner.agents.supervise import FAILURE_GRACE
from horovod.runner.compute_service import ComputeService
from horovod.runner.elastic.discovery import HostDiscovery, HostManager, NoMoreHosts
from horovod.runner.elastic.driver import Driver
from horovod.runner.elastic.job_state import Limits
from horovod.runner.elastic.mailbox import Mailbox
from horovod.runner.functions.function_call import (
    CALL,
    SEARCH_PATH,
    Failure,
    RemoteError,
    failures,
    pickled,
    put,
    search_path,
    take,
)
from horovod.runner.functions.run_function import collect_results, raise_outcome, run
from horovod.runner.jobs.fixed_ranks import FixedRanks
from horovod.runner.jobs.request import JobRequest
from horovod.runner.options.parser import DEFAULT_WORKER_FAILURES
from horovod.runner.output.console import Colour, Console
from horovod.runner.output.progress import list_some
from horovod.runner.output.report import LaunchError, Outcome
from horovod.runner.output.watcher import JobWatcher, Status
from horovod.runner.slots.hosts import Host, plan_slots
from horovod.runner.slots.worker_env import (
    KEY,
    interface_variables,
    memory_variables,
    slot_variables,
)
