"""The error a user can fix: one line, no traceback, exit code 2 from the command line."""

import contextlib
import errno
import os
import re
from collections.abc import Generator


class UserError(ValueError):
    """Bad input from outside: a path, a flag, a file's content.

    The message is one line that names the offending value and the fix; `cli.py` prints it alone and
    exits with code 2. Everything else is a defect and keeps its traceback.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


@contextlib.contextmanager
def disk_errors(what: str) -> Generator[None]:
    """Turns what the operating system refuses inside the block into a UserError.

    Args:
        what: the first words of the message, for example "checkpoint in runs/nano not saved"; with
            "not readable" it is about a file to read.

    tensorstore reports system errors as ValueError with the number in the text. An error without a
    number is a defect and passes through.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        found = re.search(r"os_error_code='(\d+)'|\[Errno (\d+)\]", str(error))
        number = getattr(error, "errno", None) or (found and int(found[1] or found[2]))
        if not number:
            raise
        full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if "not readable" in what:
            fix = "name a file that can be read"
        else:
            fix = "free some space" if full else "choose a folder that can be written"
            fix += " and start again"
        raise UserError(f"{what}: {os.strerror(number)}; {fix}") from error
