"""`chunkserve preflight`: tries, in seconds and with deadlines, all that a start would wait for. Leaves nothing."""
