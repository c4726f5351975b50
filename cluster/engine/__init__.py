"""The engine: the step loop, the executors that carry out its plans, and the actor around them. No HTTP, no text."""
