"""Benchmarks: load for any OpenAI-compatible server, and the checks that need a running service.

Run one by name from the repository root: `python -m benchmarks NAME [options]`; README.md lists them.
"""
