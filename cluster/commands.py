"""The commands: `chunkserve serve`, `chunkserve preflight`, `chunkserve batch`, `chunkserve check-config`,
`chunkserve prepare`, `chunkserve model fetch`.

Exit status 0 is success (a service that was asked to stop included), 1 a failure while running, 2 a wrong setting or
command line. Errors are one line on standard error.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.errors import ChunkserveError, ConfigError
from cluster.settings.local_device import find_device
from cluster.settings.source import resolve
from cluster.settings.tree import DEFAULT_MODEL

MAX_CONCURRENCY = 4096
"""Of a batch's lines: as many as an engine admits."""


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

    _add_batch(commands.add_parser("batch", help="answer every line of a file, on an engine of its own or a service"))

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


def _add_address(parser: argparse.ArgumentParser, default: str | None = None, note: str = "") -> None:
    parser.add_argument(
        "--address",
        default=default,
        help=f"a running Ray cluster to use (host:port, or auto); without it Ray is started and stopped again{note}",
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as YAML")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings; the last word wins")


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", required=True, metavar="PATH", help="requests, in OpenAI's batch format")
    parser.add_argument("--output", required=True, metavar="PATH", help="their answers, in the input's order")
    parser.add_argument("--errors", metavar="PATH", help="lines that have none, and why (OUTPUT.errors.jsonl)")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="what is done so far (OUTPUT.journal)")
    parser.add_argument("--url", help="a running service (http://host:port), used at the lowest priority")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="the key of the service at --url")
    parser.add_argument(
        "--concurrency", type=_positive(int, MAX_CONCURRENCY), default=64, metavar="N", help="lines in flight (64)"
    )
    parser.add_argument(
        "--retry-seconds", type=_positive(float), default=600.0, metavar="S", help="how long no answer is borne (600)"
    )
    _add_address(parser, os.environ.get("RAY_ADDRESS"), "; RAY_ADDRESS, as a Ray job has it, is the default")
    _add_settings(parser)
    parser.set_defaults(command=_batch)


def _positive(kind: Callable[[str], float], most: float = math.inf) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value <= most or value == math.inf:
            limit = "" if most == math.inf else f" and at most {most:g}"
            raise argparse.ArgumentTypeError(f"it must be above 0{limit}")
        return value

    return parse


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


def _batch(options: argparse.Namespace) -> int:
    from cluster.frontend.api_keys import read_keys
    from cluster.jobs.command import BatchJob, run_job
    from cluster.jobs.options import job_paths, read_key, service_url

    paths = job_paths(options.input, options.output, options.errors, options.journal)
    if options.url is not None:
        if options.settings or options.config:
            raise ConfigError("settings are for the batch's own service: leave them out with --url")
        key = read_key(options.api_key_file) if options.api_key_file else None
        url = service_url(options.url)
        return run_job(BatchJob(paths, options.concurrency, options.retry_seconds, key, url), _say)
    server = resolve(find_device(), options.config, options.settings).settings.server
    key = read_keys(Path(server.api_key_file).expanduser())[0] if server.api_key_file else server.api_key
    words = ["--config", str(options.config), *options.settings] if options.config else options.settings
    job = BatchJob(paths, options.concurrency, options.retry_seconds, key, address=options.address, service_words=words)
    return run_job(job, _say)


def _check_config(options: argparse.Namespace) -> int:
    for line in resolve(find_device(), options.config, options.settings).lines():
        print(line)
    return 0


def _fetch(options: argparse.Namespace) -> int:
    from cluster.models.store import open_store

    model = open_store(_say).fetch(options.id)
    _say(f"{options.id} from {model.source}: {model.directory} ({model.seconds:.1f} s)")
    return 0
