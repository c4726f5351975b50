"""The front end: the OpenAI API, text to tokens and back. It knows an engine only by the client in cluster.links."""
