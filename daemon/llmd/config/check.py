"""Refuses what cannot work before anything starts: values whose feature is not there yet, and unsafe combinations.

A key that would have no effect is never accepted in silence: either its value does something, or it is refused by name here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Struct

from llmd.config.fields import FIELDS, SECTIONS
from llmd.config.keys import key_faults, read_admin_key, read_keys
from llmd.config.listen import bare_host, host_and_port, is_loopback
from llmd.config.load import FlagValue, Loaded, load_config
from llmd.config.server_args import ServerArgs
from llmd.config.units import format_duration
from llmd.config.values import value_of
from llmd.errors import ConfigError

DUMMY: Final = "dummy"
_HOST_NAME: Final = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")


class NotYet(Struct, frozen=True):
    """Values of one key that this version can serve."""

    what: str
    """The feature that is missing."""
    works: tuple[Any, ...] = ()
    """Values that work; empty: only the default."""


#: Key -> what is missing. Everything else is served at every value that its type allows.
NOT_YET: Final[dict[str, NotYet]] = {
    "model.revision": NotYet("naming a hub's model in model.path"),
    "parallel.tp": NotYet("tensor parallelism"),
    "parallel.pp": NotYet("pipeline parallelism"),
    "parallel.dp": NotYet("data parallelism"),
    "parallel.ep": NotYet("expert parallelism"),
    "parallel.dp_attention": NotYet("data parallel attention"),
    "parallel.nnodes": NotYet("several machines"),
    "parallel.node_rank": NotYet("several machines"),
    "parallel.dist_init_addr": NotYet("several machines"),
    "parallel.backend": NotYet("Ray"),
    "supervision.spare_worker": NotYet("a spare worker (it would save 0.2 s of a restart with the native kernels)", ("auto", False)),
    "lora.max_adapters": NotYet("LoRA adapters"),
    "lora.max_rank": NotYet("LoRA adapters"),
    "lora.adapters": NotYet("LoRA adapters"),
    "observability.tracing.otlp_endpoint": NotYet("tracing"),
}


def check_args(args: ServerArgs, *, allow_failpoints: bool) -> None:
    """Raise ConfigError with every reason why these arguments cannot be served."""
    if faults := type_faults(args):
        raise ConfigError(faults)
    if found := arg_faults(args, allow_failpoints=allow_failpoints):
        raise ConfigError([fault for _, fault in found])


def type_faults(args: ServerArgs) -> list[str]:
    """Values that no file could have given: msgspec looks at types and limits when it reads, not when Python makes a ServerArgs."""
    default = ServerArgs()
    for section in SECTIONS:  # outer ones first
        wanted, given = type(value_of(default, section)), value_of(args, section)
        if not isinstance(given, wanted):
            return [f"{section}: expected {wanted.__name__}, got {type(given).__name__}"]
    faults = []
    for key, field in FIELDS.items():
        try:
            msgspec.convert(msgspec.to_builtins(value_of(args, key)), field.annotation)
        except (msgspec.ValidationError, TypeError, OverflowError):
            faults.append(f"{key}: expected {field.expects}, got {value_of(args, key)!r:.60}")
    return faults


def load_checked(
    config_file: str | None, overrides: list[str], environ: Mapping[str, str], *, flags: tuple[FlagValue, ...] = (), allow_failpoints: bool
) -> Loaded:
    """`load_config`, and what `check_args` finds: all faults of both at once, each with the place where its value was written."""
    return load_config(config_file, overrides, environ, flags=flags, check=partial(arg_faults, allow_failpoints=allow_failpoints))


def arg_faults(args: ServerArgs, *, allow_failpoints: bool) -> list[tuple[str, str]]:
    """(key, fault) of everything that cannot be served; each fault begins with its key."""
    faults = [fault for key in NOT_YET if (fault := _not_yet(args, key))]
    faults += _empty(args)
    if args.model.path == DUMMY and not allow_failpoints:
        faults.append("model.path: `dummy` is for tests and needs --allow-failpoints")
    faults += _key_faults(args)
    faults += _admin_faults(args)
    first, second, most = args.supervision.restart.backoff
    if not first <= second <= most:
        faults.append("supervision.restart.backoff: the waits must not become shorter")
    faults += _heartbeat_faults(args)
    return [(fault.partition(":")[0], fault) for fault in faults]


def _heartbeat_faults(args: ServerArgs) -> list[str]:
    """Each under the key that was changed, so that it is told where that was written."""
    beat, faults = args.supervision.heartbeat, []
    for key in ("supervision.hang_timeout", "supervision.helper_timeout", "supervision.control_timeout"):
        limit = value_of(args, key)
        if limit >= 2 * beat:
            continue
        ours, other = (key, "supervision.heartbeat") if limit != FIELDS[key].default else ("supervision.heartbeat", key)
        values = {key: format_duration(limit), "supervision.heartbeat": format_duration(beat)}
        faults.append(
            f"{ours}: {values[ours]} does not go with {other}: {values[other]}; a timeout is at least two heartbeats, or healthy processes are killed"
        )
    return faults


def _host_faults(host: str) -> list[str]:
    try:
        ipaddress.ip_address(bare_host(host).partition("%")[0])
    except ValueError:
        if host and not _HOST_NAME.fullmatch(host):
            return [f"http.host: {host!r} is not an address: expected an IP address or the name of a host, without a port"]
    return []


def _empty(args: ServerArgs) -> list[str]:
    """Paths and names that are the empty text: what a template leaves where a variable was not set."""
    keys = [key for key, field in FIELDS.items() if field.path or field.is_text]
    texts = (
        (key, value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else (value,)) for key in keys for value in [value_of(args, key)]
    )
    return [f"{key}: empty, expected {FIELDS[key].expects}" for key, found in texts if "" in found]


def _key_faults(args: ServerArgs) -> list[str]:
    """Who may use the model: key files that cannot be used, and an address that is open to everybody."""
    http = args.http
    if faults := _host_faults(http.host):
        return faults
    faults = [f"http.api_keys_file: {fault}" for fault in key_faults(http.api_keys_file, read_keys)]
    faults += [f"http.admin_key_file: {fault}" for fault in key_faults(http.admin_key_file, read_admin_key)]
    if http.api_keys_file is None and not is_loopback(http.host) and not http.allow_unauthenticated:
        faults.append(
            f"http.host: {http.host!r} is not loopback and there is no API key, so anybody who reaches it could use the model: "
            "set http.api_keys_file, listen on 127.0.0.1 behind a proxy, or set http.allow_unauthenticated: true"
        )
    if args.observability.metrics.require_key and http.api_keys_file is None:
        faults.append("observability.metrics.require_key: true needs http.api_keys_file, or nobody could read the metrics")
    return faults


def _admin_faults(args: ServerArgs) -> list[str]:
    """The admin plane over TCP: never without a key, and never with the key in clear over a network."""
    admin = args.admin
    if admin.listen is None:
        return [f"admin.{name}: has no effect without admin.listen" for name in ("tls_cert", "tls_key") if getattr(admin, name) is not None]
    faults = []
    try:
        host, _ = host_and_port(admin.listen)
    except ValueError as error:
        return [f"admin.listen: {error}"]
    if args.http.admin_key_file is None:
        faults.append("admin.listen: needs http.admin_key_file, or anybody who reaches it could stop llmd")
    if (admin.tls_cert is None) != (admin.tls_key is None):
        faults.append("admin.tls_cert: a certificate and its key (admin.tls_key) belong together")
    elif admin.tls_cert is None and not is_loopback(host):
        faults.append(f"admin.listen: {host!r} is not loopback, and without admin.tls_cert and admin.tls_key the admin key would cross the network in clear")
    elif admin.tls_cert is not None and admin.tls_key is not None:
        faults += _tls_faults(admin.tls_cert, admin.tls_key)
    return faults


def _tls_faults(cert: str, key: str) -> list[str]:
    import ssl

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError is one
        return [f"admin.tls_cert: {cert} and {key} cannot be used: {error.strerror or error}"]
    return []


def _not_yet(args: ServerArgs, key: str) -> str | None:
    from llmd.config.show import redact_url

    rule, value = NOT_YET[key], value_of(args, key)
    works = rule.works or (FIELDS[key].default,)
    if value in works:
        return None
    shown = redact_url(value) if isinstance(value, str) and "://" in value else value
    return f"{key}: {shown!r} needs {rule.what}, which this version does not have; use {' or '.join(map(_word, works))}"


def _word(value: Any) -> str:
    from llmd.config.show import scalar

    return scalar(value)
