"""What front ends and engines say to each other, and the sockets on which they say it."""
