"""Chinese translations of the texts of `vitascope.language`, for readers in simplified characters."""

from vitascope.chinese.commands import COMMANDS
from vitascope.chinese.lessons import LESSONS
from vitascope.chinese.options import OPTIONS
from vitascope.chinese.report import REPORT

CHINESE = COMMANDS | OPTIONS | REPORT | LESSONS
"""Translations by the English text. Places for values have the same names: {name} of `str.format` in Python,
%(name)s in templates, where a percent sign is %%. `# images` is a count with its noun."""
