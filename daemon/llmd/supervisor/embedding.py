"""Puts the parts together: specs and settings in, the exit status out. What `main` and the tests start."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Mapping

from llmd.plan.journal import HEAD, died_alone
from llmd.plan.ports import PortArgs
from llmd.plan.spec import ProcessSpec
from llmd.supervisor import conf, patches, rundir
from llmd.supervisor.core import Core
from llmd.supervisor.crashes import CrashFiles
from llmd.supervisor.environ import child_env
from llmd.supervisor.facts import Crash, Report, Settings
from llmd.supervisor.interrupts import Interrupted
from llmd.supervisor.logsink import LogSink
from llmd.supervisor.loop import LlmdSupervisor, seconds_left_of
from llmd.supervisor.notify import Notifier
from llmd.supervisor.options import LlmdOptions
from llmd.supervisor.os_seam import Os


class Embedding:
    """One supervisord in this process, which must have one thread and the run directory's lock."""

    def __init__(
        self,
        specs: tuple[ProcessSpec, ...],
        settings: Settings,
        *,
        ports: PortArgs,
        listener: socket.socket | None,
        backlog: int,
        env: Mapping[str, str],
        sink: LogSink,
        notifier: Notifier,
        os_: Os,
        on_ready: Callable[[Report], None],
        on_progress: Callable[[Report], None] = lambda report: None,
        crashes: CrashFiles | None = None,
        about: Mapping[str, str] | None = None,
    ) -> None:
        """`about`: what else a record of a crash says: versions, the configuration."""
        self._crashes = crashes
        self._about = dict(about or {})
        self._sink = sink
        self._oom_kills = os_.oom_kills()
        self.out_of_memory = False
        """Whether the kernel, for want of memory, ended what crashed last."""
        self._ports = ports
        self._os = os_
        by_name = {spec.name: spec for spec in specs}
        rundir.write_needed(ports.supervisord_conf, conf.render(specs, settings.stop_timeout).encode())
        parent = os_.pid()

        def env_of(name: str) -> dict[str, str]:
            core = self.core
            incarnation, crashed = core.children[name].incarnation, core.crashed(name)
            return child_env(env, by_name[name].env, incarnation=incarnation, epoch=core.epoch, parent=parent, crashed=crashed)

        self._supervisor: LlmdSupervisor | None = None
        left = seconds_left_of(lambda: self._supervisor)
        options = LlmdOptions(ports.supervisord_conf, by_name, os_=os_, listener=listener, backlog=backlog, child_env=env_of, seconds_left=left)
        patches.apply(sink, options.exit_code)
        supervisor = LlmdSupervisor(options, sink, ports.reports)
        self.core = Core(
            specs,
            settings,
            supervisor,
            os_=os_,
            notifier=notifier,
            tail=sink.tail,
            on_ready=on_ready,
            on_state=self.write_state,
            on_progress=on_progress,
            died_alone=self._died_alone,
            on_crash=self._record,
        )
        supervisor.core = self.core
        if crashes is not None:
            supervisor.unwritten = lambda: crashes.unwritten(os_.monotonic())
        self._supervisor = supervisor

    def run(self) -> int:
        """Until everything has stopped. Returns the exit status."""
        assert self._supervisor is not None
        self.write_state("starting", "", "")
        try:
            status = self._supervisor.main()
        except Interrupted:
            self.write_state("stopped", "", "")
            raise
        except BaseException:
            self._kill_all()
            self.write_state("failed", "", "internal error")
            raise
        ended = "failed" if status not in (0, 130) else "starting" if self.core.again else "stopped"
        self.write_state(ended, "", "\n".join(self.core.last_words[:1]))
        return status

    def _record(self, crash: Crash) -> None:
        """One crash, into a file."""
        seen, self._oom_kills = self._oom_kills, self._os.oom_kills()
        self.out_of_memory = crash.end.status == -signal.SIGKILL and crash.end.reason == "signal" and self._oom_kills > seen
        if self._crashes is None:
            return
        end, spec = crash.end, crash.spec
        facts = {
            "process": spec.name,
            "role": spec.role,
            "rank": spec.rank,
            "pid": crash.pid,
            "incarnation": crash.incarnation,
            "epoch": crash.epoch,
            "uptime_s": round(crash.uptime_s, 3),
            "reason": end.reason,
            "status": end.status,
            "how": end.describe(),
            "why": crash.why,
            "phase": crash.phase,
            "last_words": end.stderr.rpartition("\n")[2],
            "oom": self.out_of_memory,
            **self._about,
            **({"weights_version": crash.weights_version} if crash.weights_version else {}),
        }
        self._crashes.write(facts, self._sink.everything(spec.name), self._os.wall())

    def _died_alone(self, spec: ProcessSpec, epoch: int) -> bool:
        head = self._os.read_head(str(self._ports.journal(0)), HEAD.size) if spec.role == "scheduler" else b""
        return died_alone(head, epoch)

    def write_state(self, state: str, stage: str, reason: str) -> None:
        """RUN/state.json: what llmctl shows when nobody answers."""
        rundir.write_state(self._ports.last_state, state, stage, reason, self._os.wall())

    def _kill_all(self) -> None:
        assert self._supervisor is not None
        for name in self.core.children:
            with contextlib.suppress(KeyError):
                pid = self._supervisor.pid(name)
                if pid:
                    self._os.kill_group(pid, 9)
