"""Every error that Luban raises. One sentence each: what, where, what to do."""


class LubanError(Exception):
    """Base of every error of Luban's own."""


class UnsupportedOperatorError(LubanError):
    """Operators that Luban cannot compile, all of them at once.

    `operators` is a list of `"overload (source line)"` strings, one for each distinct operator.
    """

    def __init__(self, operators: list[str]):
        self.operators = list(operators)
        listed = "; ".join(self.operators)
        super().__init__(
            f"Luban has no kernels for {len(self.operators)} operator(s): {listed}; "
            'pass fallback="allow" to run them in eager'
        )


class TargetError(LubanError):
    """An unknown chip, or a program that does not fit the chip it is asked to run on."""


class VerificationError(LubanError):
    """An IR module breaks a rule; the message names the operation and the rule."""


class ConfigError(LubanError):
    """A wrong option, argument or input file."""
