"""Settings of Spark that decide whether failed tasks, executors and nodes are used again.

They are for ``run_elastic``, whose failing workers make their Spark tasks fail: give some of these
pairs to the session that is created::

    SparkSession.builder.config(*SPARK_CONF_ALWAYS_RESTART_FAILED_TASK)

Spark counts failures only where excluding is enabled. "Reuse" then means that failures never count
against an executor or node, "don't reuse" that the first failure excludes it. "In app" is about the
whole application, the others about one stage.
"""

from __future__ import annotations

Setting = tuple[str, str]

_UNLIMITED = str(2**31 - 1)
_EXCLUDE = "spark.excludeOnFailure"  # spark.blacklist until Spark 3.1
_TASK_EXECUTOR = f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor"
_TASK_NODE = f"{_EXCLUDE}.task.maxTaskAttemptsPerNode"
_STAGE_EXECUTOR = f"{_EXCLUDE}.stage.maxFailedTasksPerExecutor"
_STAGE_NODE = f"{_EXCLUDE}.stage.maxFailedExecutorsPerNode"
_APP_EXECUTOR = f"{_EXCLUDE}.application.maxFailedTasksPerExecutor"
_APP_NODE = f"{_EXCLUDE}.application.maxFailedExecutorsPerNode"

SPARK_CONF_ALWAYS_RESTART_FAILED_TASK: Setting = ("spark.task.maxFailures", _UNLIMITED)
"""Start failed tasks again for ever, instead of giving up after the fourth failure of one."""

SPARK_CONF_BLACKLIST_DISABLED: Setting = (f"{_EXCLUDE}.enabled", "false")
SPARK_CONF_BLACKLIST_ENABLED: Setting = (f"{_EXCLUDE}.enabled", "true")

SPARK_CONF_REUSE_FAILED_EXECUTOR: Setting = (_STAGE_EXECUTOR, _UNLIMITED)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR: Setting = (_STAGE_EXECUTOR, "1")
SPARK_CONF_REUSE_FAILING_NODE: Setting = (_STAGE_NODE, _UNLIMITED)
SPARK_CONF_DONT_REUSE_FAILING_NODE: Setting = (_STAGE_NODE, "1")

SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP: Setting = (_APP_EXECUTOR, _UNLIMITED)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP: Setting = (_APP_EXECUTOR, "1")
SPARK_CONF_REUSE_FAILING_NODE_IN_APP: Setting = (_APP_NODE, _UNLIMITED)
SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP: Setting = (_APP_NODE, "1")

SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK: Setting = (_TASK_EXECUTOR, _UNLIMITED)
SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK: Setting = (_TASK_EXECUTOR, "2")
SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK: Setting = (_TASK_EXECUTOR, "1")
SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK: Setting = (_TASK_NODE, _UNLIMITED)
SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK: Setting = (_TASK_NODE, "2")
SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK: Setting = (_TASK_NODE, "1")

SPARK_CONF_DEFAULT_VALUES: dict[str, str] = {
    "spark.task.maxFailures": "4",
    f"{_EXCLUDE}.enabled": "false",
    _TASK_EXECUTOR: "1",
    _TASK_NODE: "2",
    _STAGE_EXECUTOR: "2",
    _STAGE_NODE: "2",
    _APP_EXECUTOR: "2",
    _APP_NODE: "2",
}
"""What Spark does without any of them."""
