"""The error a user can fix: one line, no traceback, exit code 2 from the command line."""


class UserError(ValueError):
    """Bad input from outside: a path, a flag, a file's content.

    The message is one line that names the offending value and the fix; `cli.py` prints it alone and
    exits with code 2. Everything else is a defect and keeps its traceback.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))
