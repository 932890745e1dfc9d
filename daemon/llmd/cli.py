"""`llmd`: run, check, pull, models, version. The control command of a running llmd is `llmctl`.

Each verb imports what it needs when it runs. Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

if __name__ == "__main__":  # `python -m llmd.cli`: the same as the command, whose imports may be interrupted
    from llmd.safe_path import leave_directory

    leave_directory()

    import sys

    from llmd.entry import main as entry

    sys.exit(entry())

import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from llmd import __version__
from llmd.entry import prepare
from llmd.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, ConfigError, LlmdError, exhausted
from llmd.observability.meter import Meter

_EXITS = """\b
Exit status:
  0    asked to stop (SIGTERM, SIGINT, llmctl stop)
  2    bad command line
  70   gave up: crash budget spent, engine lost, internal error
  71   OS resource: port, socket path, run directory, lock, file descriptors
  78   this configuration or these model files can never work
  130  second SIGINT: stopped at once
"""


def _one_file(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
    """One file at most: which of several holds is nothing to guess."""
    if len(values) > 1:
        raise click.BadParameter(f"given {len(values)} times; llmd reads one file")
    if "" in values:
        raise click.BadParameter("empty, expected a file")
    return values[0] if values else None


def _assignments(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not value.partition("=")[1] or not value.partition("=")[0].strip():
            raise click.BadParameter(f"{value!r} is no KEY=VALUE, like http.port=8080")
    return values


config_option = click.option(
    "-c", "--config", "config_file", metavar="FILE", multiple=True, callback=_one_file, help="Configuration file (YAML). Default: $LLMD_CONFIG, else none."
)
set_option = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_assignments,
    help="Set one key, for example --set http.port=8080. May be repeated.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="llmd %(version)s")
def llmd() -> None:
    """An LLM server that an operator runs the way they run a database."""


@llmd.command(epilog=_EXITS)
@config_option
@set_option
@click.option("--model", metavar="PATH", help="Short for --set model.path=PATH.")
@click.option("--host", help="Short for --set http.host=HOST.")
@click.option("--port", help="Short for --set http.port=PORT.")
@click.option("--allow-failpoints", is_flag=True, help="Let LLMD_FAILPOINTS provoke faults. For tests.")
def run(config_file: str | None, overrides: tuple[str, ...], model: str | None, host: str | None, port: str | None, allow_failpoints: bool) -> int:
    """Run llmd in the foreground until it is asked to stop."""
    from llmd.supervisor.interrupts import Interrupted, interruptible

    short = {"model.path": model, "http.host": host, "http.port": port}
    overrides += tuple(f"{key}={value}" for key, value in short.items() if value is not None)
    try:
        with interruptible():  # from here on a stop is a stop, however little has been done
            from llmd.supervisor.main import RunOptions
            from llmd.supervisor.main import run as supervise

            return supervise(RunOptions(config_file=config_file, overrides=overrides, allow_failpoints=allow_failpoints))
    except Interrupted as signal:
        click.echo(f"llmd: {signal} before anything was started", err=True)
        return EXIT_OK


@llmd.command()
@config_option
@set_option
@click.option("--print", "show", is_flag=True, help="Print the effective configuration as YAML, with each value's source.")
@click.option("--allow-failpoints", is_flag=True, hidden=True)
def check(config_file: str | None, overrides: tuple[str, ...], show: bool, allow_failpoints: bool) -> int:
    """Check the configuration, the model's files, directories and ports; print the plan. Starts nothing."""
    from llmd.config.check import load_checked

    try:
        loaded = load_checked(config_file, list(overrides), os.environ, allow_failpoints=allow_failpoints)
    except ConfigError as error:
        if show:
            raise
        from llmd.supervisor.planview import more_faults

        raise more_faults(error, os.environ) from None
    if show:
        from llmd.config.show import render

        click.echo(render(loaded), nl=False)
        return EXIT_OK
    from llmd.supervisor.planview import describe

    click.echo(describe(loaded, os.environ), nl=False)
    return EXIT_OK


@llmd.command()
@click.argument("name")
@config_option
@set_option
@click.option("--cache-dir", type=click.Path(path_type=Path), hidden=True)
def pull(name: str, config_file: str | None, overrides: tuple[str, ...], cache_dir: Path | None) -> int:
    """Fetch a model into the cache: one that llmd knows by NAME, or hf:OWNER/NAME[@REVISION] from the Hugging Face hub.

    Verified, resumed where an earlier try ended, and never half there. Prints what to set model.path to.
    """
    directory = cache_dir or _cache_dir(config_file, overrides)
    meter = Meter(sys.stderr)
    if name.startswith("hf:"):
        from llmd.store.hub import pull as pull_repository

        click.echo(str(pull_repository(name, directory, meter.line)))
        return EXIT_OK
    from llmd.store.pull import pull as pull_model

    click.echo(str(pull_model(name, directory, meter.line, meter.progress)))
    return EXIT_OK


@llmd.command()
@config_option
@set_option
def models(config_file: str | None, overrides: tuple[str, ...]) -> int:
    """List the models that are here or can be pulled: size, what each can be loaded as, and where it is."""
    from llmd.store.inventory import list_models, packed_note, table

    directory = _cache_dir(config_file, overrides)
    click.echo(table(list_models(directory)) + packed_note(directory), nl=False)
    return EXIT_OK


@llmd.command()
def version() -> int:
    """Print the version."""
    click.echo(f"llmd {__version__}")
    return EXIT_OK


def _cache_dir(config_file: str | None, overrides: tuple[str, ...]) -> Path:
    from llmd.config.load import load_config
    from llmd.config.resolve import resolve_dirs

    return Path(resolve_dirs(load_config(config_file, list(overrides), os.environ).args, os.environ).cache_dir)


def main(argv: list[str] | None = None) -> int:
    """Entry point. Every way out is an exit status of the contract."""
    if argv is None:
        prepare()

    def run() -> int:
        status = llmd.main(args=argv, prog_name="llmd", standalone_mode=False)
        return status if isinstance(status, int) else EXIT_OK

    return guarded(run)


def guarded(run: Callable[[], int]) -> int:
    """What `run` returns, or the status of the error that ends it, which is shown."""
    try:
        return run()
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("llmd: interrupted", err=True)
        return EXIT_INTERRUPTED
    except LlmdError as error:
        if not error.shown:
            _show(error)
        return error.exit_status
    except Exception as error:
        if (told := exhausted(error)) is not None:
            _show(told)
            return told.exit_status
        import traceback

        traceback.print_exc()
        return LlmdError.exit_status


def _show(error: LlmdError) -> None:
    """The hint before the fault: the last line is the reason, wherever it is looked for."""
    if error.hint:
        click.echo(f"llmd: hint: {error.hint}", err=True)
    for line in getattr(error, "faults", None) or error.message.splitlines():
        click.echo(f"llmd: {line}", err=True)
