"""The front: HTTP in, tokens out; holds the queue and the record of every request. Never torch."""
