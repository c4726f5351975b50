"""The workers: ranks that hold weights and KV shards and execute step plans.

Of the scheduler they know only the wire types (`scheduler.plan`, `scheduler.sampling_params`).
They know torch; Ray appears only in `workers.actor`. They do not know HTTP, text, queues or policy.
"""
