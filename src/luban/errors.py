"""Every error that Luban raises. One sentence each: what, where, what to do."""

from __future__ import annotations

import errno
import re

_TORCH_ASKED = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


class LubanError(Exception):
    """Base of every error of Luban's own."""


class UnsupportedOperatorError(LubanError):
    """Operators that Luban cannot compile, all of them at once.

    `operators` is a list of `"overload (source line)"` strings, one for each distinct operator.
    """

    def __init__(self, operators: list[str], advice: str = 'pass fallback="allow" to run them in eager'):
        self.operators = list(operators)
        listed = "; ".join(self.operators)
        super().__init__(f"Luban has no kernels for {len(self.operators)} operator(s): {listed}; {advice}")


class TargetError(LubanError):
    """An unknown chip, or a program that does not fit the chip it is asked to run on."""


class NanError(LubanError):
    """A NaN that a program compiled with `detect_nan` met. `kernel` is the first that made one, None for an input's."""

    def __init__(self, message: str, kernel: str | None):
        self.kernel = kernel
        super().__init__(message)


class VerificationError(LubanError):
    """An IR module breaks a rule; the message names the operation and the rule."""


class ConfigError(LubanError):
    """A wrong option, argument or input file."""


class OutOfMemoryError(LubanError, MemoryError):
    """The system gave no memory for what a program or a training needs."""


def memory_wanted(error: BaseException) -> str | None:
    """What an error says of memory that ran out, e.g. "no memory for 312 MiB"; None for an error of another kind.

    torch raises a RuntimeError of its allocator's, Python a MemoryError that often says nothing, the system ENOMEM.
    """
    if isinstance(error, OutOfMemoryError):
        return str(error).split(";")[0]
    asked = _TORCH_ASKED.search(str(error)) if isinstance(error, RuntimeError) else None
    if asked is not None:
        return f"no memory for {-(-int(asked[1]) // (1 << 20))} MiB"
    if isinstance(error, RuntimeError) and "Storage size calculation overflowed" in str(error):
        return "no memory for so large a tensor"
    if isinstance(error, MemoryError):
        return "no memory left"
    return "no memory left" if isinstance(error, OSError) and error.errno == errno.ENOMEM else None
