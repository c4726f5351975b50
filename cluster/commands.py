"""The commands: `chunkserve serve`, `chunkserve preflight`, `chunkserve check-config`, `chunkserve prepare`,
`chunkserve model fetch`.

Exit status 0 is success (a service that was asked to stop included), 1 a failure while running, 2 a wrong setting or
command line. Errors are one line on standard error.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.errors import ChunkserveError, ConfigError
from cluster.settings.local_device import find_device
from cluster.settings.source import resolve
from cluster.settings.tree import DEFAULT_MODEL


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes positional words from one place only; settings may stand before and after options.
    if rest and (not hasattr(options, "settings") or any(word.startswith("-") for word in rest)):
        parser.error(f"unknown arguments: {' '.join(rest)}; settings are words like server.port=8001")
    if rest:
        options.settings += rest
    try:
        return int(options.command(options))
    except ConfigError as error:
        print(f"chunkserve: {error}", file=sys.stderr)
        return 2
    except ChunkserveError as error:
        print(f"chunkserve: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="chunkserve", description="A Ray-distributed LLM serving cluster.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model until Ctrl-C or SIGTERM")
    _add_address(serve)
    _add_settings(serve)
    serve.set_defaults(command=_serve)

    preflight = commands.add_parser("preflight", help="try what serve would need of a cluster, and tell what lacks")
    _add_address(preflight)
    _add_settings(preflight)
    preflight.set_defaults(command=_preflight)

    check = commands.add_parser("check-config", help="print every setting with where its value came from")
    _add_settings(check)
    check.set_defaults(command=_check_config)

    node = commands.add_parser("prepare", help="fetch the model and compile the kernels, as every node needs them")
    _add_settings(node)
    node.set_defaults(command=_prepare)

    model = commands.add_parser("model", help="work with models on this machine")
    model_commands = model.add_subparsers(required=True, metavar="COMMAND")
    fetch = model_commands.add_parser("fetch", help="download a model, or look for a newer version of it")
    fetch.add_argument("id", nargs="?", default=DEFAULT_MODEL, help=f"a hub id (default: {DEFAULT_MODEL})")
    fetch.set_defaults(command=_fetch)
    return parser


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        help="a running Ray cluster to use (host:port, or auto); without it Ray is started and stopped again",
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as YAML")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings; the last word wins")


def _say(line: str) -> None:
    print(line, flush=True)


def _serve(options: argparse.Namespace) -> int:
    from cluster.launch.launcher import Launcher

    return Launcher(resolve(find_device(), options.config, options.settings), options.address, _say).run()


def _prepare(options: argparse.Namespace) -> int:
    from cluster.launch.node import prepare

    prepare(resolve(find_device(), options.config, options.settings), _say)
    return 0


def _preflight(options: argparse.Namespace) -> int:
    from cluster.preflight.command import preflight

    resolved = resolve(find_device(), options.config, options.settings)
    return preflight(resolved.settings, resolved.device, options.address, _say)


def _check_config(options: argparse.Namespace) -> int:
    for line in resolve(find_device(), options.config, options.settings).lines():
        print(line)
    return 0


def _fetch(options: argparse.Namespace) -> int:
    from cluster.models.store import open_store

    model = open_store(_say).fetch(options.id)
    _say(f"{options.id} from {model.source}: {model.directory} ({model.seconds:.1f} s)")
    return 0
