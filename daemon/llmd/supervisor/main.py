"""`llmd run`: everything that must hold before a worker starts, in this order, then the embedded supervisord.

configuration -> failpoints -> run directory and lock -> port -> model pulled -> model's files checked -> plan -> children.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import NoReturn

import msgspec
import setproctitle
from msgspec import Struct
from msgspec.structs import replace

from llmd import __version__, failpoints
from llmd.config import ServerArgs
from llmd.config import source as sources
from llmd.config.check import check_args
from llmd.config.resolve import Dirs, resolve_args, resolve_dirs
from llmd.config.source import ConfigSource
from llmd.errors import EXIT_CONFIG, EXIT_OK, EXIT_RESOURCE, ConfigError, GaveUp, LlmdError, ResourceError, UsageError, exhausted
from llmd.observability import logs
from llmd.observability.lines import LineWrapper
from llmd.plan.ports import PortArgs
from llmd.plan.spec import Boot, make_plan
from llmd.supervisor import admin_path, banner, conf, cpus, directories, environ, last_start, memory_plan, preflight, rundir, sockets
from llmd.supervisor.crashes import CrashFiles
from llmd.supervisor.facts import Report, Settings
from llmd.supervisor.interrupts import Interrupted, Overdue, deadline, interruptible
from llmd.supervisor.logsink import LogSink, SinkStream, sink_for
from llmd.supervisor.notify import Notifier
from llmd.supervisor.os_seam import Os
from llmd.supervisor.sockets import Listener
from llmd.supervisor.starting import OnStage, Starting, Steps

log = logging.getLogger("llmd.supervisor")

#: Name of the supervisor's own log file and lines.
NAME = "supervisor"
#: In `ps`, like the children's; llmctl knows a live llmd by the word in it.
TITLE = "llmd: supervisor"


class RunOptions(Struct, frozen=True):
    """The command line of `llmd run`."""

    config_file: str | None = None
    overrides: tuple[str, ...] = ()
    allow_failpoints: bool = False


class Held(Struct):
    """What a life of llmd holds of the system, to be given back in the end."""

    lock: rundir.Lock | None = None
    listener: Listener | None = None
    admin_socket: Path | None = None
    """Once it is sure that it is nobody else's."""
    again: bool = False
    """This life is over, and the next one begins in the same process."""

    def give_back(self) -> None:
        """Once nothing of the run directory is needed any more."""
        if self.listener is not None:
            self.listener.socket.close()
        if self.lock is not None:
            self.lock.release()


def run(options: RunOptions, env: MutableMapping[str, str] = os.environ) -> int:
    """Run llmd in the foreground. Returns the exit status, or raises an LlmdError before anything was started."""
    with interruptible():
        arm(env, allow_failpoints=options.allow_failpoints)
        try:
            source = sources.read(options.config_file, options.overrides, env, allow_failpoints=options.allow_failpoints)
        except ConfigError as error:
            last_start.failed(error, options.config_file, options.overrides, env, failpoints=options.allow_failpoints)
            raise
        failpoints.hit("supervisor.config")
        return serve(source.args, env, allow_failpoints=options.allow_failpoints, source=source)


def serve(
    args: ServerArgs,
    env: MutableMapping[str, str] = os.environ,
    *,
    allow_failpoints: bool = False,
    on_stage: OnStage | None = None,
    source: ConfigSource | None = None,
) -> int:
    """`run` with a configuration that is there already.

    `on_stage`: llmd is embedded. Nothing listens for HTTP, frontend 0 is the process that started this one, and it is told how
    far the start is: a few words, and `boot` once the boot file can be read.
    """
    os_ = Os()
    check_args(args, allow_failpoints=allow_failpoints)
    fields = args.observability.log_format == "auto"
    if fields:
        args = replace(args, observability=replace(args.observability, log_format="text" if sys.stderr.isatty() else "json"))
    dirs = resolve_dirs(args, env)
    os.umask(0o027)
    warnings = directories.prepare(args, dirs)
    sink = sink_for(Path(dirs.log_dir), os_, wrapper=LineWrapper(as_json=args.observability.log_format == "json"), fields=fields)
    _log_to(sink, args)
    for warning in warnings:
        log.warning("%s", warning)
    notifier = Notifier(env)
    start = Starting(notifier, sink, args.supervision.startup_timeout, on_stage)
    ports = PortArgs(dirs.run_dir)
    held = Held()
    try:
        with interruptible():
            boot = prepare(args, dirs, ports, env, os_, start, held, allow_failpoints=allow_failpoints, embedded=on_stage is not None, source=source)
            if on_stage is not None:
                on_stage("boot")
            setproctitle.setproctitle(TITLE)
            status = _supervise(boot, held, env, sink, notifier, os_, on_stage)
    except Interrupted as stop:
        log.info("llmd ends with status %d: %s before anything was started", EXIT_OK, stop)
        return EXIT_OK
    except LlmdError as error:
        if on_stage is None and args.observability.log_format == "json":
            _log_error(error)
        raise
    except Exception as error:
        if (refused := exhausted(error, f"cannot start at {start.stage!r}")) is not None:
            if on_stage is None and args.observability.log_format == "json":
                _log_error(refused)
            raise refused from error
        log.exception("internal error")
        log.error("llmd ends with status %d: internal error: %r", GaveUp.exit_status, error)
        told = GaveUp(f"internal error: {error!r}")
        told.shown = on_stage is None
        raise told from error
    finally:
        sink.show("")
        if held.lock is not None:
            rundir.clear(ports, held.admin_socket)
        held.give_back()
        sink.close()
    if held.again:
        start_again()
    return status


def start_again() -> NoReturn:
    """Become a new llmd: same pid, command line, environment and standard streams. Stops that come meanwhile wait until it can take them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    os.execv(sys.executable, sys.orig_argv)


def prepare(
    args: ServerArgs,
    dirs: Dirs,
    ports: PortArgs,
    env: MutableMapping[str, str],
    os_: Os,
    start: Starting,
    held: Held,
    *,
    allow_failpoints: bool,
    embedded: bool,
    source: ConfigSource | None,
) -> Boot:
    """All that can fail for a reason that is not a worker's. Writes the boot file. Lock and listening socket, once taken, are put into `held`."""
    limit = 2 * args.supervision.startup_timeout
    pull = preflight.needs_pull(args, Path(dirs.cache_dir))
    try:
        with deadline(limit + (preflight.PULL_DEADLINE_S if pull else 0)):
            start.at("run directory")
            _allow_files()
            ports.check(args.http.workers)
            rundir.prepare(ports, args.admin.group)
            held.lock = rundir.Lock(ports.lock)
            return _prepare_locked(args, dirs, ports, held, env, os_, start, allow_failpoints=allow_failpoints, embedded=embedded, source=source)
    except Overdue:
        _write_failure(ports, held, f"{start.stage} was not done after {limit:g} s", os_)
        raise GaveUp(f"llmd could not start: {start.stage} was not done after {limit:g} s") from None
    except LlmdError as error:
        _write_failure(ports, held, error.message.partition("\n")[0], os_)
        raise


def _allow_files() -> None:
    """As many descriptors as supervisord insists on; it would say so in words of its own. Raises ResourceError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= conf.MINFDS:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (conf.MINFDS, hard if hard == resource.RLIM_INFINITY else max(hard, conf.MINFDS)))
    except (ValueError, OSError):
        raise ResourceError(f"llmd may open {hard} files, and needs {conf.MINFDS}", hint="raise `ulimit -n`, or LimitNOFILE= in the unit") from None


def _write_failure(ports: PortArgs, held: Held, why: str, os_: Os) -> None:
    if held.lock is not None:
        rundir.write_state(ports.last_state, "failed", "", why, os_.wall())


def _admin_socket(args: ServerArgs, ports: PortArgs) -> Path:
    return Path(args.admin.socket) if args.admin.socket else ports.admin_socket


def _prepare_locked(
    args: ServerArgs,
    dirs: Dirs,
    ports: PortArgs,
    held: Held,
    env: MutableMapping[str, str],
    os_: Os,
    start: Starting,
    *,
    allow_failpoints: bool,
    embedded: bool,
    source: ConfigSource | None,
) -> Boot:
    assert held.lock is not None
    start_id, started_at = secrets.token_hex(8), os_.wall()
    admin_socket = _admin_socket(args, ports)
    facts = {**last_start.facts(dirs, source, failpoints=allow_failpoints), "start_id": start_id, "started_at": started_at, "admin_socket": str(admin_socket)}
    held.lock.write(facts)  # before what may fail: whoever looks for the reason finds what was to run
    admin_path.judge(args.admin.socket)
    held.admin_socket = admin_socket
    rundir.clear_stale_sockets(ports, admin_socket, args.http.workers)
    start.at("port")
    failpoints.hit("supervisor.bind")
    listener = held.listener = None if embedded else sockets.listen(args.http.host, args.http.port, args.http.backlog, env)
    url = listener.url if listener is not None else ""
    held.lock.write({**facts, "http": url})
    cache_dir, base = Path(dirs.cache_dir), environ.cleaned(env, failpoints=allow_failpoints)
    if preflight.needs_pull(args, cache_dir):
        start.at("pull")
        log.info("pulling %s into %s", args.model.path, cache_dir)
        preflight.pull(args.model.path, cache_dir, base, os_, start.output)
    start.at("model files")
    memory_plan.refuse_absent_gpu(args)
    files = preflight.check(args, cache_dir, base, os_, [cache_dir, ports.private], meanwhile=_import_supervisord)
    if Path(files.small_dir).is_relative_to(ports.small):
        log.warning("nothing can be kept in %s, so the model's small files are made anew at each start, in %s: set cache_dir", cache_dir, ports.private)
    start.at("plan")
    failpoints.hit("supervisor.plan")
    args = resolve_args(args, files, threads=cpus.available())
    memory_plan.plan_memory(args, files)
    threads = args.model.threads
    assert isinstance(threads, int)
    boot = Boot(
        start_id=start_id,
        started_at=started_at,
        args=args,
        ports=ports,
        files=files,
        processes=make_plan(args, ports, threads=threads, external_frontend=embedded),
        http_url=url,
        state_dir=dirs.state_dir,
        cache_dir=dirs.cache_dir,
        log_dir=dirs.log_dir,
        failpoints=allow_failpoints,
        external_frontend=embedded,
        socket_activated=listener is not None and listener.activated,
        source=source,
    )
    try:
        rundir.write_file(ports.boot, boot.dump())
    except OSError as error:
        raise ResourceError(f"cannot write {ports.boot}: {os.strerror(error.errno or 0)}") from None
    return boot


def _import_supervisord() -> None:
    """A third of what the supervisor imports, while the checking child has a core of its own."""
    import llmd.supervisor.embedding  # noqa: F401


def _supervise(boot: Boot, held: Held, env: MutableMapping[str, str], sink: LogSink, notifier: Notifier, os_: Os, on_stage: OnStage | None) -> int:
    from llmd.supervisor.embedding import Embedding

    supervision = boot.args.supervision
    settings = Settings(
        start_id=boot.start_id,
        restart=supervision.restart,
        drain_timeout=boot.args.http.drain_timeout,
        stop_timeout=supervision.stop_timeout,
        control_timeout=supervision.control_timeout,
        startup_timeout=supervision.startup_timeout,
        external_frontend=boot.external_frontend,
    )

    steps = Steps(sink)

    def on_ready(report: Report) -> None:
        sink.show("")
        if boot.external_frontend:
            log.info("ready: %s (weights %s)", boot.served_name, boot.files.weights_version)
            return
        log.info("ready: %s serves %s (weights %s)", boot.http_url, boot.served_name, boot.files.weights_version)
        if boot.args.observability.log_format == "text" or os.isatty(1):
            _print(banner.text(boot), os_)

    embedding = Embedding(
        boot.processes,
        settings,
        ports=boot.ports,
        listener=held.listener.socket if held.listener is not None else None,
        backlog=boot.args.http.backlog,
        env=environ.cleaned(env, failpoints=boot.failpoints),
        sink=sink,
        notifier=notifier,
        os_=os_,
        on_ready=on_ready,
        on_progress=steps.take,
        crashes=CrashFiles(Path(boot.state_dir) / "crashes"),
        about=_about(boot),
    )
    log.info(
        "llmd %s starts %d processes, pid %d, %s, run directory %s",
        __version__,
        len(boot.processes),
        os_.pid(),
        boot.http_url or "embedded",
        boot.ports.run_dir,
    )
    status = embedding.run()
    held.again = embedding.core.again and status == EXIT_OK
    if held.again:
        log.info("llmd starts again, as asked")
        return status
    if on_stage is not None and embedding.core.failed_at:
        on_stage(embedding.core.failed_at)
    stays = sink.directory is not None and not sink.directory.is_relative_to(boot.ports.run_dir)  # an Engine's logs go with its run directory
    _say_last_words(status, embedding.core.last_words, sink.directory if stays else None, oom=embedding.out_of_memory)
    return status


def _about(boot: Boot) -> dict[str, str]:
    """What a record of a crash says of what ran; the configuration by a hash, for it may hold what is nobody's business."""
    config = hashlib.sha256(msgspec.json.encode(boot.args)).hexdigest()[:12]
    return {"version": __version__, "model": boot.served_name, "weights_version": boot.files.weights_version, "config_sha256": config}


def _say_last_words(status: int, words: list[str], log_dir: Path | None, *, oom: bool) -> None:
    """The child's last lines first, then where to look, so that the reason is the last line of the log."""
    for line in words[1:]:
        log.error("%s", line)
    if words:
        log.error("what to do: %s", _advice(status, words[0], log_dir, oom=oom))
        log.error("llmd ends with status %d: %s", status, words[0])
    else:
        log.info("llmd ends with status %d", status)


def _advice(status: int, reason: str, log_dir: Path | None, *, oom: bool) -> str:
    where = f"{log_dir}/*.log" if log_dir is not None else "the lines above"
    if status == EXIT_CONFIG:
        return "correct what the last line names; `llmd check` looks for faults without starting"
    if status == EXIT_RESOURCE:
        return "free what the last line names, then start again"
    if "hung and was killed" in reason:
        return f"llmd itself sent signal 9 to what made no progress for `supervision.hang_timeout` or `helper_timeout`: its stacks are in the log; see {where}"
    if "SIGKILL" in reason and oom:
        return f"the kernel ran out of memory and sent signal 9: look for it with `journalctl -k` or dmesg, set memory.max_total_tokens; see {where}"
    if "SIGKILL" in reason:
        return f"signal 9 came from outside, not for want of memory: find out who sends it (`llmctl crashes`, an operator, a script); see {where}"
    return f"see {where} for what came before"


def arm(env: MutableMapping[str, str], *, allow_failpoints: bool) -> None:
    """Arm the failpoints of the environment; refused unless they were asked for."""
    spec = env.get(failpoints.ENV, "")
    if spec and not allow_failpoints:
        raise UsageError(f"{failpoints.ENV} is set, but --allow-failpoints is not given", hint="failpoints are for tests: unset the variable")
    failpoints.arm(spec)


def _log_to(sink: LogSink, args: ServerArgs) -> None:
    """Our own log takes the children's way, so that it cannot block either."""
    logs.setup(NAME, args.observability.log_level, args.observability.log_format)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(SinkStream(sink, NAME))


def _log_error(error: LlmdError) -> None:
    """A failed start in a log of JSON lines; whoever shows errors to people need not do so again."""
    for line in getattr(error, "faults", None) or error.message.splitlines():
        log.error("%s%s", line, f" ({error.hint})" if error.hint else "")
    log.error("llmd ends with status %d: %s", error.exit_status, error.message.rpartition("\n")[2])
    error.shown = True


def _print(text: str, os_: Os) -> None:
    """To stdout, if somebody reads it."""
    if os_.writable(1):
        with contextlib.suppress(OSError):
            os_.write(1, text.encode())
