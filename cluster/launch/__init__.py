"""From settings to a running service, and back to nothing: Ray, the Serve application, signals and the watchdog."""
