"""The settings tree: what an operator may say, where each value came from, and what is refused."""
