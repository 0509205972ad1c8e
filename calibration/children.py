"""How a module runs in a Python of its own: whatever files lie in the working directory, unless this one imports from there as well.

`python -m` and `python -c` look there first: a random.py or grp.py of the user's would stand in for the standard library's.
"""

from __future__ import annotations

import os
import sys

RUN = "import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"


def running(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as a program."""
    return code(RUN.format(module=module), *arguments)


def code(text: str, *arguments: str) -> list[str]:
    """The command that runs a line of code."""
    here = {"", os.getcwd()} & set(sys.path)
    start = "" if here else "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
    return [sys.executable, "-c", start + text, *arguments]
