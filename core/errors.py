"""The exception tree. Every message says what was wrong, the value, the limit and the knob.

PdserveError
├── ConfigError      a flag, environment variable or file entry
├── ModelError       a checkpoint that cannot be served
├── LayoutError      two pools or specs that do not fit each other
├── OutOfBlocksError a reservation that was not checked first (our own bug)
├── ProtocolError    a peer said something no state allows
│   └── CodecError   bytes that are no message of ours
└── RefusedError     a peer refused the handshake, naming the field
"""


class PdserveError(Exception):
    pass


class ConfigError(PdserveError):
    pass


class ModelError(PdserveError):
    pass


class LayoutError(PdserveError):
    pass


class OutOfBlocksError(PdserveError):
    pass


class ProtocolError(PdserveError):
    pass


class CodecError(ProtocolError):
    pass


class RefusedError(PdserveError):
    def __init__(self, field: str, reason: str):
        super().__init__(f"handshake refused, field {field!r}: {reason}")
        self.field = field
        self.reason = reason
