"""Open a file system by a URL, on the driver and on every rank.

Stores use fsspec; pyarrow reads Parquet through its own local and HDFS file systems where it has
them, and through fsspec elsewhere.
"""

from __future__ import annotations

from typing import Any


def split_url(url: str) -> tuple[str, str]:
    """Return the protocol of a URL, "file" for a bare path, and what follows it."""
    if "://" in url:
        protocol, _, rest = url.partition("://")
        return protocol, rest
    if url.startswith("file:/"):
        return "file", url[len("file:") :]
    return "file", url


def arrow_filesystem(url: str, storage_options: dict[str, Any] | None = None) -> tuple[Any, str]:
    """Return pyarrow's file system for a URL, and the path in it."""
    import pyarrow.fs as arrow

    protocol, rest = split_url(url)
    if protocol in ("file", "local"):
        return arrow.LocalFileSystem(), rest
    if protocol == "hdfs":
        return _hadoop(url, storage_options or {})
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(url, **(storage_options or {}))
    return arrow.PyFileSystem(arrow.FSSpecHandler(filesystem)), path


def _hadoop(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    from horovod.spark.common.stores import hdfs

    host, port, path = split_hdfs(url)
    filesystem = hdfs.connect(
        options.get("host") or host or "default",
        options.get("port") or port or 0,
        user=options.get("user"),
        kerb_ticket=options.get("kerb_ticket"),
        extra_conf=options.get("extra_conf"),
    )
    hdfs.look_at(filesystem, path)  # raises if we may not look, which does not mean no data
    return filesystem, path


def split_hdfs(url: str) -> tuple[str | None, int | None, str]:
    """Return host, port and path of hdfs://host:port/path, hdfs:///path or /path."""
    protocol, rest = split_url(url)
    if protocol == "file" and url.startswith("/"):
        return None, None, url
    if protocol != "hdfs":
        raise ValueError(f"{url!r} is not a path of HDFS: it must begin with hdfs:// or with /")
    authority, slash, path = rest.partition("/")
    if not slash or not path:
        raise ValueError(f"{url!r} has no path: give one, as in hdfs://namenode:8020/user/me")
    host, _, port = authority.partition(":")
    if port and not port.isdigit():
        raise ValueError(f"{port!r} in {url!r} is not a port number")
    return host or None, int(port) if port else None, "/" + path
