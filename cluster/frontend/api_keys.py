"""The API keys that a front end accepts: one from the settings, and those of a file that may change meanwhile."""

import hmac
import logging
import os
from pathlib import Path

from cluster.errors import ConfigError

logger = logging.getLogger(__name__)


def read_keys(path: Path) -> list[str]:
    """The keys of a file, one a line; blank lines and lines that begin with # are none.

    Raises ConfigError naming the file if it cannot be read, holds no key (an empty file must not open the service), or
    one that no client could send.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"server.api_key_file {path} cannot be read: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"server.api_key_file {path} holds no key")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ConfigError(f"server.api_key_file {path} holds a key that is not printable ASCII")
    return keys


class ApiKeys:
    """Says who may ask. A file that was changed holds from the next request on, so that keys can be replaced."""

    def __init__(self, key: str | None, file: Path | None) -> None:
        """Without both everybody may ask. Raises ConfigError as `read_keys` does."""
        self._key = [key] if key is not None else []
        self._file = file
        self._stamp = _stamp(file)
        self._expected = _headers([*self._key, *(read_keys(file) if file is not None else [])])

    def accept(self, authorization: str) -> bool:
        """Whether a request with this Authorization header may be answered; "" where it has none."""
        self._read_again()
        given = authorization.encode("latin-1")
        # Every key is compared, so that the time tells nothing about which one was nearly right.
        matches = [hmac.compare_digest(given, each) for each in self._expected]
        return not self._expected or True in matches

    def _read_again(self) -> None:
        stamp = _stamp(self._file)
        if self._file is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._expected = _headers([*self._key, *read_keys(self._file)])
        except ConfigError as error:
            logger.warning("the API keys stay as they were: %s", error)


def _headers(keys: list[str]) -> list[bytes]:
    return [f"Bearer {key}".encode() for key in keys]


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    """Tells versions of a file apart, without reading it; None if it is not there."""
    if file is None:
        return None
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
