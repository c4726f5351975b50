"""`chunkserve batch`: a batch from the command line, on an engine of its own or on a service that runs."""
