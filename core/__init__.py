"""Leaf package: the words every other package shares. Knows neither torch nor sockets."""
