"""The scheduler: which request computes how many tokens in the next step.

Standard library only. It knows tokens, blocks and requests; it does not know devices, processes,
clocks, text or HTTP, and imports none of them. The same code runs as the production scheduler,
as a unit test and as the simulator.
"""
