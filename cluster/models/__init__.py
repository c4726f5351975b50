"""Models on disk: found, fetched, converted and verified before anything starts."""
