"""What Ray and Serve must find in their environment on every node, wherever and by whom they are started."""

STREAM_SECONDS = 24 * 3600
"""Longest stream that a change of front ends must not cut."""

CLUSTER_ENVIRONMENT = {
    # Ray would let every other program on the machine go before the model and the streams.
    "RAY_worker_niceness": "0",
    # A worker that does not answer is not worth the default 5 s of grace.
    "RAY_kill_worker_timeout_milliseconds": "500",
    # A reload of HAProxy (front ends came or went) cuts streams that are still open after this long.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(STREAM_SECONDS),
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(STREAM_SECONDS),
    # A stopping front end keeps its port this long; that requests are refused is its own 503.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""The Dockerfiles set it too, with HAProxy on."""
