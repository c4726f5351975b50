"""Other servers that ours is measured against, each in an environment of its own."""
