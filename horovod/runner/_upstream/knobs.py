"""Functions of Horovod 0.28.1 that turn configuration files and options into variables.

The variables are those that `horovod.runner.options.tunables` declares. Each is an attribute of
this module, too, whose value is its own name.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from horovod.runner.options.config_file import CONTROLLER, CONTROLLERS, schema
from horovod.runner.options.tunables import IB_DISABLE, TUNABLES, settings_environment


def __getattr__(name: str) -> str:
    if name == IB_DISABLE or name in {row.env for row in TUNABLES}:
        return name
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def set_args_from_config(
    args: argparse.Namespace, config: Mapping[str, Any], override_args: Collection[str]
) -> None:
    """Set options from a configuration that was read, except `override_args`."""
    controller = config.get(CONTROLLER)
    if controller and not (args.use_gloo or args.use_mpi):
        if controller not in CONTROLLERS:
            raise ValueError(f"controller must be gloo or mpi, not {controller!r}")
        setattr(args, f"use_{controller}", True)
    for key, row in schema().items():
        if row is None or row.dest in override_args:
            continue
        section, _, name = key.partition(".")
        found = (config.get(section) or {}).get(name)
        if found is not None:
            setattr(args, row.dest, not found if key == row.inverse_key else found)


def validate_config_args(args: argparse.Namespace) -> None:
    """Raise `ValueError`, which names the option, if one has no sensible value."""
    for row in TUNABLES:
        value = getattr(args, row.dest, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
            raise ValueError(f"{row.dest}={value} must be >= 0")


def set_env_from_args(env: dict[str, str], args: argparse.Namespace) -> dict[str, str]:
    """Add the variables that the options set to `env`, and return it."""
    env.update(settings_environment(args, env))
    return env
