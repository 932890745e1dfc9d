"""A real systemd as PID 1 of namespaces of its own, for tests of the unit. Needs root; `why_not` says what is missing elsewhere.

systemd moves every process of the control group that it finds itself in. So the box's PID 1 first enters a fresh child group in each hierarchy
that systemd uses, checks that it is there, and only then unshares the cgroup namespace. Its life is bounded, whatever becomes of the test.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

import psutil

from tests.daemon import SLOW

LIFE_S = round(240 * SLOW)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NEEDED = ("unshare", "nsenter", "setpriv", "pivot_root", "timeout", "ip", "systemctl", "mount", "dbus-daemon")
#: What root in the box must not do to the machine.
_DROPPED = "-sys_time,-sys_module,-sys_rawio,-sys_pacct,-mknod,-syslog,-mac_admin,-mac_override,-audit_control"

_ENTER = r"""
set -eu
box=$1; name=$2; shift 2
for group in "$@"; do echo 0 > "$group/cgroup.procs"; done
[ "$(grep -c "/$name\$" /proc/self/cgroup)" -ge $# ] || { echo "not in groups of my own" >&2; exit 1; }
exec unshare --cgroup bash -c "$INSIDE" inside "$box" "$name"
"""

_INSIDE = r"""
set -eu
T=$1; R=$T/root
mount --make-rprivate /
mount -t tmpfs -o size=2g,mode=755 box "$T"
mkdir "$T/upper" "$T/work" "$R"
mount -t overlay -o "lowerdir=/,upperdir=$T/upper,workdir=$T/work" box "$R"
mount --make-private "$R"
mount -t proc -o nosuid,nodev,noexec proc "$R/proc"
for f in sys sysrq-trigger irq bus; do
    [ ! -e "$R/proc/$f" ] || { mount --bind "$R/proc/$f" "$R/proc/$f"; mount -o remount,bind,ro "$R/proc/$f"; }
done
mount --bind /dev/null "$R/proc/kmsg"
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$R/sys"
mount -t tmpfs -o mode=755,nosuid,size=1m dev "$R/dev"
for f in null zero full random urandom tty; do touch "$R/dev/$f"; mount --bind "/dev/$f" "$R/dev/$f"; done
mkdir "$R/dev/pts" "$R/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$R/dev/pts"
mount -t tmpfs -o mode=1777,nosuid,nodev shm "$R/dev/shm"
ln -s pts/ptmx "$R/dev/ptmx"; ln -s /proc/self/fd "$R/dev/fd"
ln -s fd/0 "$R/dev/stdin"; ln -s fd/1 "$R/dev/stdout"; ln -s fd/2 "$R/dev/stderr"
mount -t tmpfs -o mode=755,nosuid,nodev run "$R/run"
mount -t tmpfs -o mode=1777,nosuid,nodev tmp "$R/tmp"
mkdir -p "$R$REPOSITORY"
mount --rbind "$REPOSITORY" "$R$REPOSITORY"
mount --make-rprivate "$R$REPOSITORY"
mount -o remount,bind,ro "$R$REPOSITORY"
if grep -q ":name=systemd:" /proc/self/cgroup; then
    mount -t tmpfs -o mode=755,nosuid,nodev,noexec,size=1m cgroup "$R/sys/fs/cgroup"
    mkdir "$R/sys/fs/cgroup/systemd" "$R/sys/fs/cgroup/unified"
    mount -t cgroup -o nosuid,nodev,noexec,none,name=systemd cgroup "$R/sys/fs/cgroup/systemd"
    ! grep -q "^0::" /proc/self/cgroup || mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$R/sys/fs/cgroup/unified"
    mount -o remount,ro,mode=755 "$R/sys/fs/cgroup"
else
    mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$R/sys/fs/cgroup"
fi
tr -d - < /proc/sys/kernel/random/uuid > "$T/id"; rm -f "$R/etc/machine-id"; cp "$T/id" "$R/etc/machine-id"
rm -f "$R/etc/fstab" "$R/.dockerenv"; : > "$R/etc/fstab"; hostname box
rm -rf "$R/etc/systemd/system" "$R/run/systemd"
mkdir -p "$R/etc/systemd/system" "$R/etc/systemd/system-generators" "$R/etc/systemd/journald.conf.d"
ln -s /lib/systemd/system/multi-user.target "$R/etc/systemd/system/default.target"
for f in systemd-udevd.service systemd-udev-trigger.service systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-journald-audit.socket \
    systemd-modules-load.service systemd-sysctl.service systemd-timesyncd.service systemd-networkd.service systemd-networkd.socket systemd-resolved.service \
    systemd-random-seed.service systemd-binfmt.service proc-sys-fs-binfmt_misc.automount sys-kernel-debug.mount sys-kernel-tracing.mount \
    sys-kernel-config.mount sys-fs-fuse-connections.mount dev-hugepages.mount dev-mqueue.mount systemd-remount-fs.service systemd-pstore.service \
    getty.target console-getty.service systemd-firstboot.service systemd-repart.service networking.service; do
    ln -s /dev/null "$R/etc/systemd/system/$f"
done
for f in systemd-sysv-generator systemd-getty-generator systemd-gpt-auto-generator systemd-fstab-generator; do
    ln -sf /dev/null "$R/etc/systemd/system-generators/$f"
done
printf '[Journal]\nStorage=volatile\nAudit=no\nRateLimitIntervalSec=0\nReadKMsg=no\n' > "$R/etc/systemd/journald.conf.d/box.conf"
ip link set lo up
cd "$R"; pivot_root . .; umount -l .; cd /
mount --make-rshared /
exec setpriv --bounding-set="$DROPPED" env -i PATH="$PATH" LANG=C.UTF-8 container=box /lib/systemd/systemd --system --log-target=journal --show-status=0
"""


def why_not() -> str | None:
    """What is missing for a box on this machine; None: nothing."""
    if os.geteuid() != 0:
        return "a systemd box needs root"
    missing = [tool for tool in _NEEDED if shutil.which(tool, path=_PATH) is None]
    if missing or not os.access("/lib/systemd/systemd", os.X_OK):
        return f"a systemd box needs {', '.join(missing) or 'systemd'}"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "a systemd box needs overlayfs"
    if not _hierarchies():
        return "no cgroup hierarchy that systemd uses is mounted"
    tried = subprocess.run(
        ["unshare", "--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup", "--fork", "true"], capture_output=True, timeout=20, check=False
    )
    return "namespaces cannot be unshared here" if tried.returncode else None


def _hierarchies() -> list[Path]:
    """Our own groups in the hierarchies that systemd keeps its processes in."""
    found = []
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        key = "" if kind == "cgroup2" else "name=systemd"
        if kind in ("cgroup", "cgroup2") and key in own and (kind == "cgroup2" or "name=systemd" in options.split(",")):
            found.append(Path(mount) / own[key].lstrip("/"))
    return found


class Box:
    """Boots on entry, gone on exit. `repository` is to be seen inside, read-only."""

    def __init__(self, directory: Path, repository: Path) -> None:
        self._directory = directory
        self._repository = repository
        self._name = f"llmd-box-{os.getpid()}"
        self._groups: list[Path] = []
        self._pid = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Box:
        mount = self._directory / "mnt"
        mount.mkdir()
        for parent in _hierarchies():
            (group := parent / self._name).mkdir()
            self._groups.append(group)
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--mount", "--uts", "--ipc", "--net", "--fork", "--kill-child=KILL"]
        words += ["bash", "-c", _ENTER, "enter", str(mount), self._name, *map(str, self._groups)]
        env = {"PATH": _PATH, "INSIDE": _INSIDE, "REPOSITORY": str(self._repository), "DROPPED": _DROPPED}
        console = (self._directory / "console").open("wb")
        with console:
            self._process = subprocess.Popen(
                ["timeout", "-s", "KILL", str(LIFE_S), *words], env=env, stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True
            )
        try:
            self._boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _boot(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + 40 * SLOW
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(psutil.Error):
                family = psutil.Process(self._process.pid).children(recursive=True)
                self._pid = next((p.pid for p in family if p.name() == "systemd"), 0)
            if self._pid and Path(f"/proc/{self._pid}/root/run/systemd/private").exists():
                state = self.run("systemctl", "is-system-running", "--wait", check=False).strip()
                if state in ("running", "degraded"):
                    return
            time.sleep(0.05)
        raise AssertionError(f"the box has not booted: {(self._directory / 'console').read_text()[-2000:]}")

    def run(self, *words: str, check: bool = True, stdin: str = "", timeout: float = 60 * SLOW) -> str:
        """Run a command in the box; its output."""
        enter = ["nsenter", "-t", str(self._pid), "-a", "--wd", "setpriv", f"--bounding-set={_DROPPED}", "env", "-i", f"PATH={_PATH}", "LANG=C.UTF-8"]
        done = subprocess.run([*enter, *words], input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False)
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stdout[-3000:]}"
        return done.stdout

    def write(self, path: str, text: str, mode: str = "644") -> None:
        """Make a file in the box."""
        self.run("install", "-D", "-m", mode, "/dev/stdin", path, stdin=text)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with contextlib.suppress(psutil.Error):
                for process in psutil.Process(self._process.pid).children(recursive=True):
                    if process.name() in ("systemd", "unshare"):  # the kernel ends a pid namespace with its PID 1
                        with contextlib.suppress(psutil.Error):
                            process.kill()
            self._process.kill()
            self._process.wait(10)
        for group in self._groups:
            for _ in range(50):
                for inner in sorted(group.rglob("*"), reverse=True):
                    if inner.is_dir():
                        with contextlib.suppress(OSError):
                            inner.rmdir()
                with contextlib.suppress(OSError):
                    group.rmdir()
                if not group.exists():
                    break
                time.sleep(0.1)
