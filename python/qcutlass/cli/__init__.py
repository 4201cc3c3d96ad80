"""The command `qcutlass`."""

from qcutlass.cli.commands import app as app
