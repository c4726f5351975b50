"""What a batch from the command line is asked to do, checked."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cluster.batch.files import exists, local_path
from cluster.errors import ConfigError
from cluster.frontend.api_keys import read_keys


@dataclass(frozen=True, slots=True)
class JobPaths:
    """Where a batch's files are. The journal is on this machine; the others wherever fsspec finds them."""

    input: str
    output: str
    errors: str
    journal: Path

    @property
    def service_log(self) -> Path:
        """What the batch's own service says."""
        return self.journal.with_name(f"{self.journal.name}.service.log")

    def output_exists(self) -> bool:
        """Raises ConfigError if that cannot be told."""
        return exists(self.output)


def job_paths(input: str, output: str, errors: str | None, journal: Path | None) -> JobPaths:
    """Fill in what was not given. Raises ConfigError naming the option."""
    local = local_path(output)
    if journal is None:
        if local is None:
            raise ConfigError(f"--output {output} is not on this machine: --journal must name a file that is")
        journal = local.with_name(f"{local.name}.journal")
    errors = f"{output}.errors.jsonl" if errors is None else errors
    names = {"--input": input, "--output": output, "--errors": errors, "--journal": str(journal)}
    places: dict[str, str] = {}
    for option, name in names.items():
        place = local_path(name)
        other = places.setdefault(name if place is None else str(place), option)
        if other != option:
            raise ConfigError(f"{other} and {option} name the same file")
    for option in ("--output", "--errors", "--journal"):
        place = local_path(names[option])
        if place is not None and (place.is_dir() or not place.parent.is_dir()):
            raise ConfigError(f"{option} {names[option]} is no place for a file: it is a directory, or lies in none")
    if exists(output) and not journal.exists():
        raise ConfigError(f"--output {output} exists, and not by this batch; remove it or name another")
    return JobPaths(input, output, errors, journal)


def service_url(url: str) -> str:
    """Without its end, which the lines have. Raises ConfigError for what is no service's address."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known or parts.path.rstrip("/") not in ("", "/v1") or parts.query:
        raise ConfigError(f"--url {url!r} must be http://host:port or https://host:port, with or without /v1")
    return url.rstrip("/").removesuffix("/v1")


def read_key(path: Path) -> str:
    """The first key of a file like those of `server.api_key_file`. Raises ConfigError if there is none."""
    try:
        return read_keys(path)[0]
    except ConfigError as error:
        raise ConfigError(str(error).replace("server.api_key_file", "--api-key-file", 1)) from error
