"""How many engines there should be: what each one tells of its load, and a policy that Ray Serve asks."""
