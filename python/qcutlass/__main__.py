"""`python -m qcutlass` is the command `qcutlass`."""

from qcutlass.cli import app

app(prog_name="qcutlass")
