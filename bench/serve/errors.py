"""The error of benchmarks of a server. It has a module of its own, since the HTTP client takes long to import."""


class BenchError(Exception):
    """The server cannot be benchmarked: it is not there, refuses, or does not speak the protocol."""
