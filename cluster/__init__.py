"""The cluster: the engine loop, Ray actors and deployments, links, the OpenAI API and the command line.

It knows Ray, Serve and the two rooms below it (`workers`, `scheduler`). It holds no scheduling rule
and no tensor.
"""
