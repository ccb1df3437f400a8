"""The pytest plugin: hooks, options, fixture, marker, run."""
