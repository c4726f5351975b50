"""Batches: many requests in a file, each answered exactly once. Knows neither Ray, engines nor the command line."""
